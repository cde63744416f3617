"""The embedded engine: token ids in, token ids out, with continuous batching and live weight swaps.

async with Engine("tiny") as engine:
    completions = await engine.generate(EngineRequest(prompt_ids=[1, 2, 3]))
"""

from lockstep.engine.config import EngineOptions, ModelConfig
from lockstep.engine.engine import Engine
from lockstep.engine.sequence import EngineRequest, StreamedToken

__all__ = ["Engine", "EngineOptions", "EngineRequest", "ModelConfig", "StreamedToken"]
