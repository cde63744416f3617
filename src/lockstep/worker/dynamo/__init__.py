"""The embedded engine as a worker of an NVIDIA Dynamo deployment."""
