"""Level 5: functions with the interface of TransformerEngine's PyTorch front end."""
