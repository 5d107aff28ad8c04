"""Text and conversations to token ids, and back."""
