"""Logical axes of parameters to axes of a mesh of devices."""
