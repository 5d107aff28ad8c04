"""One file of declarative rows per model family."""
