"""The learner of one rank: a model sharded by FSDP2, with the bits of a learner of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lockstep.checkpoint.digest import tensor_digest
from lockstep.checkpoint.open import open_checkpoint
from lockstep.engine import sharded
from lockstep.engine.weights.digest import digest_of
from lockstep.engine.weights.published import gather_again
from lockstep.tokens.errors import BadRequest
from lockstep.train.config import TrainConfig
from lockstep.train.learning.batch import TrainBatch
from lockstep.train.learning.learner import Learner, PassResult, StepOutcome
from lockstep.train.learning.optimizer import Optimizer
from lockstep.train.ranks.gathered import Rows, gathered, merged
from lockstep.train.ranks.ordered_sum import OrderedSum, PassOrder, reduce_in_order
from lockstep.train.ranks.rank_group import check_device
from lockstep.train.ranks.sharded_optimizer import ShardedOptimizer
from lockstep.train.records.run_dir import RunDirectory
from lockstep.train.records.state_files import Share
from lockstep.train.records.tensor_digests import Digests


class ShardedLearner(Learner):
    """The learner of one of several ranks, which all make the same calls with the same arguments.

    Each rank has its rows of weights, gradients and optimizer state, and computes every n-th pass
    over a batch. Gradients are added in the order of the passes, so that weights, metrics and
    digests are those of a `Learner`, whatever the number of ranks. `group` connects the ranks for
    values that are not tensors.
    """

    _optimizer: ShardedOptimizer

    def __init__(
        self, config: TrainConfig, *, exact: bool, weights: Path | None = None, group: Any = None
    ) -> None:
        """Raises BadRequest for adapters, which train on one rank."""
        if config.learner.lora_rank:
            raise BadRequest(
                f"learner.lora_rank is {config.learner.lora_rank}: adapters train on one rank; "
                "leave --ranks out, or set learner.lora_rank to 0",
                param="learner.lora_rank",
            )
        check_device(config.learner.device)
        self._group = group
        self._share = Share(dist.get_rank(), dist.get_world_size())
        self._order = PassOrder()
        self._sums: list[OrderedSum] = []
        super().__init__(config, exact=exact, weights=weights)

    def _load(self, weights: Path | None) -> Any:
        model = super()._load(weights)
        # The logits are a view of the model's output, which nothing changes in place.
        warnings.filterwarnings("ignore", message=".*returned a view tensor", module="torch")
        mesh = init_device_mesh(model.device.type, (self._share.count,))
        blocks = set(model._no_split_modules or ())
        for module in list(model.modules()):
            if type(module).__name__ in blocks:
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self._sums += reduce_in_order(model, self._order)
        return model

    def _new_optimizer(self, trained: Sequence[Tensor]) -> Optimizer:
        return ShardedOptimizer(trained, self._config.learner, self._group)

    # One step

    def step(self, batch: TrainBatch, number: int) -> StepOutcome:
        try:
            return super().step(batch, number)
        finally:
            gather_again(self.model)  # what is gathered now are the weights of before

    def _run_passes(
        self, passes: Sequence[list[int]], learn_pass: Callable[[Sequence[int]], PassResult]
    ) -> list[PassResult]:
        """Compute pass r of every round on rank r; return the results of all ranks."""
        rank, count = self._share.rank, self._share.count
        for own_sum in self._sums:
            own_sum.reset()
        own: dict[int, PassResult] = {}
        for first in range(0, len(passes), count):
            self._order.active = min(count, len(passes) - first)
            self._optimizer.drop_gradients()
            if rank < self._order.active:
                own[first + rank] = learn_pass(passes[first + rank])
            else:
                # Every rank takes part in every pass; OrderedSum leaves these gradients out.
                learn_pass(passes[0][:1])
        results = merged({str(at): result for at, result in own.items()}, self._group)
        return [results[str(at)] for at in range(len(passes))]

    # Checkpoints and state

    def save(self, directory: Path, version: str) -> None:
        tolerance = self._config.learner.probe_tolerance
        sharded.save_checkpoint(self.model, directory, version=version, tolerance=tolerance)

    def save_step(self, directory: RunDirectory, step: int, facts: Mapping[str, Any]) -> Digests:
        directory.save_state(step, {**self.state(), **facts}, self._share)
        checkpoint = directory.checkpoint(step)
        self.save(checkpoint, f"step-{step}")
        return self._whole_digests(checkpoint)

    def load_step(self, directory: RunDirectory, step: int) -> dict[str, Any]:
        state = directory.load_state(step, self._share)
        self.load_state(state)
        return state

    def digests(self, checkpoint: Path) -> Digests:
        return self._whole_digests(checkpoint)

    def _whole_digests(self, checkpoint: Path) -> Digests:
        """Return the digests of whole tensors. Every rank computes those of every n-th tensor."""
        names = [name for name, own in self.model.named_parameters() if own.requires_grad]
        return {
            "gradients": self._digests(self._gradients()),
            "optimizer": self._digests(self._moments(names)),
            "weights": self._saved_digests(checkpoint),
        }

    def _digests(self, tensors: Iterator[Rows]) -> dict[str, str]:
        rows = list(tensors)
        own = {name: digest_of(whole) for name, whole in gathered(rows)}
        every = merged(own, self._group)
        return {name: every[name] for name, _, _ in rows}

    def _gradients(self) -> Iterator[Rows]:
        for name, own in self.model.named_parameters():
            if own.requires_grad and own.grad is not None:
                yield name, own.grad.to_local(), tuple(own.shape)

    def _moments(self, names: list[str]) -> Iterator[Rows]:
        shapes = dict(zip(names, self._optimizer.shapes(), strict=True))
        for key, rows in self._optimizer.tensors(names).items():
            yield key, rows, shapes[key.rpartition(".")[0]] if rows.dim() else ()

    def _saved_digests(self, checkpoint: Path) -> dict[str, str]:
        """Return the digests of the tensors that were saved, read from the files."""
        reader = open_checkpoint(checkpoint)
        own = {}
        for name in list(reader.tensors)[self._share.rank :: self._share.count]:
            tensor = reader.tensors[name]
            own[name] = tensor_digest(tensor.dtype, tensor.shape, reader.parts(name))
        every = merged(own, self._group)
        return {name: every[name] for name in reader.tensors}
