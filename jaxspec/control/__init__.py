"""Chooses what each dispatch drafts, from what earlier dispatches took and committed; plain Python and NumPy."""
