"""LoRA adapters: made of what fine-tuning has changed, and merged among themselves."""
