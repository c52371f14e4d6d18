"""Level 5: the interfaces of TransformerEngine's PyTorch front end, on our operations."""
