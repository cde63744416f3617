"""How bodies are read and written as JSON: strictly, within limits, and large arrays lazily."""
