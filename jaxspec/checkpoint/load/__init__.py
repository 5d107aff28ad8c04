"""Published tensors to parameters on their devices, and back."""
