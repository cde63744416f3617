"""OpenAI's dialect: chat completions and completions."""
