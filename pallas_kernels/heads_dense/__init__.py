"""Products of each head with its own weights: queries to the space of cached latents, and what they give to values."""
