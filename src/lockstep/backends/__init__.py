"""One worker, from outside: a driver per kind of server, all with one protocol."""

from lockstep.backends.registry import detect, open_transport
from lockstep.backends.dynamo.transport import DynamoTransport
from lockstep.backends.dynamo.generate_transport import DynamoGenerateTransport
from lockstep.backends.sglang.transport import SglangTransport
from lockstep.backends.transport import Ask, Delta, ModelCard, Transport, TransportName
from lockstep.backends.vllm.transport import VllmTransport

__all__ = [
    "Ask",
    "Delta",
    "DynamoGenerateTransport",
    "DynamoTransport",
    "ModelCard",
    "SglangTransport",
    "Transport",
    "TransportName",
    "VllmTransport",
    "detect",
    "open_transport",
]
