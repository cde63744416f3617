"""vLLM servers, from outside; `extension` runs inside them."""
