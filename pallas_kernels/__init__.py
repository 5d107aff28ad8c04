"""Pallas kernels for the accelerator, one folder per operation, each with a plain reference."""
