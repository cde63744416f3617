"""The embedded engine: token in, token out, with continuous batching and swappable weights."""

from lockstep.engine.config import EngineOptions, ModelConfig
from lockstep.engine.core import PauseMode
from lockstep.engine.engine import Engine
from lockstep.engine.sequence import EngineRequest, StreamedToken

__all__ = ["Engine", "EngineOptions", "EngineRequest", "ModelConfig", "PauseMode", "StreamedToken"]
