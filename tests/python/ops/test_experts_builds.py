"""The error bounds hold with every instruction set, and with native and converted bfloat16 GEMMs."""

import os
import pathlib
import subprocess
import sys

import pytest

TESTS = pathlib.Path(__file__).parent

REFUSED = """
import jax.numpy as jnp
from anabranch.jax import grouped_matmul

def multiply(dtype):
    return grouped_matmul(jnp.ones((2, 2), dtype), jnp.ones((1, 2, 2), dtype), jnp.array([2]))

assert multiply(jnp.float32).tolist() == [[2, 2], [2, 2]]
multiply(jnp.bfloat16).block_until_ready()
"""


def run(isa, bf16, *arguments):
    """Runs Python in a process of its own, because the library reads its environment once."""
    environment = dict(os.environ, ANABRANCH_ISA=isa, ANABRANCH_BF16=bf16)
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def bf16_products(isa, bf16):
    """The library's description of its bfloat16 GEMMs on this machine."""
    result = run(isa, bf16, "-c", "from anabranch import _library; print(_library.describe()['bf16'])")
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("isa", "bf16"), [("baseline", "convert"), ("avx2", "convert"), ("avx2", "native"), ("avx512", "native")]
)
def test_variant(isa, bf16):
    """ANABRANCH_BF16=native is an error on a machine (or an instruction set, such as AVX2) without native GEMMs."""
    products = bf16_products(isa, bf16)
    if bf16 == "native" and (isa == "avx2" or products != "native"):
        assert products.startswith("refused, ANABRANCH_BF16: got native, expected convert or unset"), products
        result = run(isa, bf16, "-c", REFUSED)
        assert result.returncode == 1, result.stderr[-4000:]
        assert "ANABRANCH_BF16: got native, expected convert or unset" in result.stderr, result.stderr[-4000:]
        assert "AssertionError" not in result.stderr, result.stderr[-4000:]
        return
    assert products == {"convert": "converted", "native": "native"}[bf16]
    selected = "(uneven_groups or large_arguments) and not torch"  # torch calls the same functions
    result = run(
        isa, bf16, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist",
        str(TESTS / "test_expert_ffn.py"), "-k", selected, "-m", "not gpu",
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-4000:]
