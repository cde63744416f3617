"""Training of LoRA adapters over one base model: datums, gradients and optimizer steps."""
