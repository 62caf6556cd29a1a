"""LoRA adapters: their files, and what they add to the linear layers of one model."""
