"""OpenAI's responses dialect: translated to chat at the edge, and back."""
