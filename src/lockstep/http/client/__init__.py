"""HTTP client: keep-alive connections, deadlines, retries, server-sent events."""
