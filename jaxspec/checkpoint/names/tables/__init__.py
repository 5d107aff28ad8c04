"""One name table per model family."""
