"""Makes a mixture of experts from a small dense model: its feed-forward stays as the shared expert."""
