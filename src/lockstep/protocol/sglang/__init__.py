"""SGLang's native dialect."""
