"""Positions of a recurrence, one after another, with its state in registers."""
