"""The same bounds hold with every instruction set, and with bfloat16 products native or converted."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent


@pytest.mark.parametrize(("isa", "bf16"), [("baseline", "convert"), ("avx2", "convert"), ("avx512", "native")])
def test_variant(isa, bf16):
    environment = dict(os.environ, ANABRANCH_ISA=isa, ANABRANCH_BF16=bf16)
    selected = "uneven_groups or large_arguments"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist"]
    result = subprocess.run(
        [*command, str(TESTS / "test_expert_ffn.py"), "-k", selected, "-m", "not gpu"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:]
