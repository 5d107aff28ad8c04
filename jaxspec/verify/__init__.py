"""Sampling rules and the acceptance of drafts."""
