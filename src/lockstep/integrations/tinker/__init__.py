"""A server of the Tinker API: its unchanged recipes train LoRA adapters on a fleet."""
