"""Which worker gets a request: admission, affinity, health."""
