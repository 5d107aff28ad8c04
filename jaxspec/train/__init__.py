"""Training of models and draft heads."""
