"""Lockstep inside a vLLM worker: staged weights, probes, repairs."""
