"""Routed experts: the weighted sum of what each row's chosen experts make of it."""
