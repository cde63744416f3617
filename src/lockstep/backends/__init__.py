"""One worker, from outside: a driver per kind of server, all with one protocol."""

from lockstep.backends.connect import detect, open_transport
from lockstep.backends.dynamo import DynamoTransport
from lockstep.backends.dynamo_generate import DynamoGenerateTransport
from lockstep.backends.sglang import SglangTransport
from lockstep.backends.transport import Ask, Delta, ModelCard, Transport, TransportName
from lockstep.backends.vllm import VllmTransport

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
