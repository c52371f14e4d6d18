"""Tests of our adapters on the libraries themselves: each is skipped where its library is not installed."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "examples"))
