"""The cache engine: one module an operation, and what composes them."""
