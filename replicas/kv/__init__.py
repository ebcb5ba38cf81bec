"""KV blocks: their tensors, who holds them, which prompts they answer, and which one goes when space is short."""
