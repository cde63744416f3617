"""NVIDIA Dynamo's dialect: chat with token ids in `nvext`."""
