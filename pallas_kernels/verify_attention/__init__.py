"""Attention of a few new positions per row, a chain or a tree, to that row's paged cache."""
