"""Runs the guides' examples for several devices on 8."""

import importlib.util
import pathlib

import pytest

FILE = pathlib.Path(__file__).parents[2] / "package" / "test_docs.py"
_spec = importlib.util.spec_from_file_location("test_docs", FILE)
_docs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_docs)


@pytest.mark.parametrize("guide", _docs.ON_DEVICES)
def test_python_blocks(guide, capsys, tmp_path):
    _docs.test_python_blocks_of_a_guide(guide, capsys, tmp_path)
