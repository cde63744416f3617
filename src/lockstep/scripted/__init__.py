"""A worker without a model: it says what a script wants, with ids and logprobs of its own."""
