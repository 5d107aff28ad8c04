"""Draft heads in every published format, in and out."""
