"""Drafters: what proposes tokens."""
