"""Grouped matrix product: each group of rows times its own matrix."""
