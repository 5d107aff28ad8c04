"""Architectures as data and the one transformer that runs them."""
