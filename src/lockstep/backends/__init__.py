"""Drivers of inference servers: one folder per engine, behind the same two protocols."""

from lockstep.backends.dynamo.generate_transport import DynamoGenerateTransport
from lockstep.backends.dynamo.transport import DynamoTransport
from lockstep.backends.registry import open_transport
from lockstep.backends.sglang.transport import SglangTransport
from lockstep.backends.transport import (
    GenerateRequest,
    ModelCard,
    StreamDelta,
    Transport,
    TransportName,
)
from lockstep.backends.vllm.transport import VllmTransport

__all__ = [
    "DynamoGenerateTransport",
    "DynamoTransport",
    "GenerateRequest",
    "ModelCard",
    "SglangTransport",
    "StreamDelta",
    "Transport",
    "TransportName",
    "VllmTransport",
    "open_transport",
]
