"""Environments: the protocol, the bundled tasks, and those of `verifiers`."""
