"""A product's parts join the residual stream, which is normalized for the next product."""
