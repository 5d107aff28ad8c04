"""The embedded demo pair: what it learns from, what it is, and how it is made."""
