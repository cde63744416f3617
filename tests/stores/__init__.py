"""Checkpoints in a real S3 server, with its faults."""
