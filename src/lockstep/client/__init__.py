"""Client of a served policy: connect, generate, chat, score."""

from lockstep.client.chat import Chat
from lockstep.client.policy import Policy, connect, generate
from lockstep.client.sync import SyncChat, SyncPolicy, connect_sync
from lockstep.client.turn import Scores, Turn

__all__ = [
    "Chat",
    "Policy",
    "Scores",
    "SyncChat",
    "SyncPolicy",
    "Turn",
    "connect",
    "connect_sync",
    "generate",
]
