"""HTTP server: uvicorn, with stricter limits and deadlines."""
