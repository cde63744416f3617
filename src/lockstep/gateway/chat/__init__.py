"""OpenAI's chat completions in front of a fleet."""
