"""From the attention input's product to normalized, rotated queries, and keys and values in their cache."""
