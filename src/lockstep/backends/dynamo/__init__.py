"""NVIDIA Dynamo deployments, from outside."""
