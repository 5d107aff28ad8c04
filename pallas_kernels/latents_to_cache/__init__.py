"""From the parts of low-rank products to normalized queries, and a latent with its rotated key in the cache."""
