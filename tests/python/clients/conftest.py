"""Tests of our adapters with the libraries themselves; each is skipped if its library is not installed."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "examples"))
