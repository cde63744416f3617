"""The options of a trainer attached to a gateway, and their command-line flags."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from lockstep.flags import Flag
from lockstep.models import bundled
from lockstep.tokens.errors import BadRequest

train_flag = partial(Flag, panel="Training and sampling")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerOptions:
    """The options of an attached trainer.

    `names` are further names of the model that clients may use. Each worker holds up to `slots`
    adapters, and training uses `threads` CPU threads. Without `train_unembed` adapters leave out
    the head, whatever clients request.
    """

    model: str
    names: Annotated[
        tuple[str, ...],
        Flag("Another name of the model that recipes may request; may be repeated.", name="name"),
    ] = ()
    device: Annotated[str, train_flag("cpu or cuda, for training and sampling.")] = "cpu"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], train_flag("Data type of the base weights.")
    ] = "float32"
    threads: Annotated[int, train_flag("Threads that training computes with.")] = 1
    slots: Annotated[
        int,
        train_flag(
            "Samplers that a worker holds at a time; further ones are stored on disk.",
            name="max_loras",
        ),
    ] = 32
    max_rank: Annotated[
        int, train_flag("Highest rank of a LoRA adapter.", name="max_lora_rank")
    ] = 64
    train_unembed: Annotated[
        bool,
        train_flag(
            "Leave the head (lm_head) out of all adapters, whatever recipes request: vLLM cannot "
            "serve it."
        ),
    ] = True

    def check(self) -> None:
        """Raise the error of a model that cannot be trained, before anything is started."""
        from lockstep.engine.config import ModelConfig

        ModelConfig.read(self.directory)

    @property
    def directory(self) -> Path:
        """The directory of the model. Raises BadRequest when there is none."""
        directory = bundled(self.model) or Path(self.model).resolve()
        if not directory.is_dir():
            raise BadRequest(
                f"model is {self.model!r}: expected a bundled name or a directory", param="model"
            )
        return directory
