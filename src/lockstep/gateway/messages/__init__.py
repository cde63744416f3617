"""Anthropic's messages dialect: translated to chat at the edge, and back."""
