"""Routing of requests to workers: admission, affinity, health."""
