"""The server that we speak HTTP with: uvicorn, and what we promise beyond it."""
