"""verifiers on Lockstep's sessions: a client for all of its dialects, and its environments."""

from lockstep.integrations.verifiers.client import LockstepClient, install
from lockstep.integrations.verifiers.environment import VerifiersEnvironment
from lockstep.integrations.verifiers.samples import trace_samples

__all__ = ["LockstepClient", "VerifiersEnvironment", "install", "trace_samples"]
