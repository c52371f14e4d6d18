"""A small byte-level Mixture-of-Experts language model, trained on the Python standard library's own source."""
