"""One URL in front of a fleet: OpenAI and vLLM routes, sessions and the control plane."""
