"""Tests of the adapters in examples/ with the libraries themselves; skipped if a library is not installed."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[3] / "examples"))
