"""The forward pass: layers, attention, rotary embedding, LoRA, arithmetic."""
