"""Drivers of vLLM servers; `extension` runs inside the server."""
