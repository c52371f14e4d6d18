"""The oracle: every operation in numpy float64, forward and hand-derived backward, written to be read."""
