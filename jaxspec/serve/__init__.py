"""Requests, scheduling and the in-process API."""
