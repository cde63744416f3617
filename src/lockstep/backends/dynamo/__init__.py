"""Drivers of NVIDIA Dynamo deployments."""
