"""OpenAI's chat completions dialect: prompts, turns, streams."""
