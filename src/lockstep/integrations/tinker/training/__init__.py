"""Training of LoRA adapters over one base model: passes, losses, gradients and steps."""
