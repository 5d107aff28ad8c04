"""The performance model, plain arithmetic."""
