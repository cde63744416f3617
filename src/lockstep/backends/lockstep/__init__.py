"""Lockstep's own workers, from outside."""
