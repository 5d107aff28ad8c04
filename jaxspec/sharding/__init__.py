"""Meshes and logical axis rules."""
