"""verifiers on Lockstep's sessions: a client for all of its dialects, and its environments."""

from lockstep.integrations.verifiers.lockstep_client import LockstepClient, install
from lockstep.integrations.verifiers.trace_samples import trace_samples
from lockstep.integrations.verifiers.verifiers_environment import VerifiersEnvironment

__all__ = ["LockstepClient", "VerifiersEnvironment", "install", "trace_samples"]
