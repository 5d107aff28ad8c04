"""The compiled step and its state."""
