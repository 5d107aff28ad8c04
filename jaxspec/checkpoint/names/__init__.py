"""Published tensor names and layouts of every family, as tables."""
