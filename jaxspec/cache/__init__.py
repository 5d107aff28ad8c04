"""The KV cache: pages, write-ahead, commit by length."""
