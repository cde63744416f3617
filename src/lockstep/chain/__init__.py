"""The hash chain of a run: one JSON record per step, each linked to the one before by SHA-256."""
