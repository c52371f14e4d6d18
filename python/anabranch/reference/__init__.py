"""The oracle: every operation in numpy float64, forward and hand-derived backward, for reading."""
