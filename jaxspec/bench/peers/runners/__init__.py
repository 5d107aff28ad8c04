"""Programs that a peer's own Python runs; they import the standard library, that peer and nothing of jaxspec."""
