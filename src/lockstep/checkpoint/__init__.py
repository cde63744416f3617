"""What a trainer hands to a fleet: files, manifest, digests, probe, and their validation."""
