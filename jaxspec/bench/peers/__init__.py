"""Other engines in the same benchmark, each in a process of its own: opt-in, and never a dependency."""
