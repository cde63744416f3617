"""A worker without a model: it replies by a script, with token ids and synthetic logprobs."""
