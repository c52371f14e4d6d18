"""Training of a small Mixture-of-Experts language model on a mesh, with the names and weights of MaxText."""
