"""Attention of a few new positions per row to chosen entries of that row's cache, and to its latest positions."""
