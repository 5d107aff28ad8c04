"""Few-row products: some rows times one big weight, a row's result the same whatever the other rows."""
