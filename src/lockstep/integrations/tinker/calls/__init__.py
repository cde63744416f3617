"""Calls of training clients: in order, exactly once, with results that are fetched later."""
