"""Level 5: the interfaces of TransformerEngine's JAX front end, on this library's operations."""
