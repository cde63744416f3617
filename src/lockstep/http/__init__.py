"""The HTTP server and the HTTP client that Lockstep speaks with, and nothing of any dialect."""
