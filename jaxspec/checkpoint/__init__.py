"""Checkpoint files to parameter trees and back."""
