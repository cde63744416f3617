"""Desired state, operations, leases and accepted versions."""
