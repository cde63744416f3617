"""Calls of training clients: in order, each once, with results that are fetched later."""
