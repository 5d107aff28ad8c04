"""Network mechanisms, one file each."""
