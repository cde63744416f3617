"""The embedded engine: token ids in, token ids out, with continuous batching and live weight swaps.

async with Engine("tiny") as engine:
    completions = await engine.generate(EngineRequest(prompt_ids=[1, 2, 3]))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy_names import import_on_use

if TYPE_CHECKING:
    from lockstep.engine.config import ModelConfig
    from lockstep.engine.engine import Engine
    from lockstep.engine.options import EngineOptions
    from lockstep.engine.sequence import EngineRequest, StreamedToken
else:
    # The command line reads EngineOptions for its flags, and must not import torch for that.
    __getattr__ = import_on_use(
        __name__,
        {
            "Engine": "engine",
            "EngineOptions": "options",
            "EngineRequest": "sequence",
            "ModelConfig": "config",
            "StreamedToken": "sequence",
        },
    )

__all__ = ["Engine", "EngineOptions", "EngineRequest", "ModelConfig", "StreamedToken"]
