"""What the GPU suite measures, one section per file."""
