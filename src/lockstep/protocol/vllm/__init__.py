"""vLLM's dialect: token-in/token-out generate, abort, tokenize."""
