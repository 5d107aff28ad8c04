"""Routing: parts of router logits become choices, their weights, and rows sorted by expert, in one launch."""
