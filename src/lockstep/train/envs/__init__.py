"""Environments: the protocol, the bundled tasks, and coding agents run as programs."""
