"""The performance model: plain arithmetic about when speculation pays."""
