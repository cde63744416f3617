"""A server of the Tinker API: recipes for it train LoRA adapters here, unchanged."""
