"""Checkpoints that a trainer hands to a fleet: files, manifest, digests, probe, validation."""
