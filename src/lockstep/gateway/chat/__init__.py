"""OpenAI's chat dialect, whose request is also the form that other dialects are translated to."""
