"""Anthropic's messages dialect: typed request and response bodies."""
