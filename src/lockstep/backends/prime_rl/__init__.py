"""prime-rl's inference servers, from outside."""
