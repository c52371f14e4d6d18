"""Inputs and comparisons shared by the tests of plan, dispatch and combine."""

import dataclasses
import zlib

import jax.numpy as jnp
import numpy as np

from anabranch.reference import dispatch as reference
from oracle import remembered

# Bounds of relative errors (Frobenius): float32 arithmetic and one rounding to the storage dtype.
BOUND = {"float32": 2e-6, "bfloat16": 2.0**-8, "float16": 2.0**-10}
FLOATS = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape, an alignment, a limit on the rows and a kind of expert selection."""

    T: int
    E: int
    K: int
    align: int = 0
    rows: float | None = None  # as a share of the assignments; None: all fit
    choice: str = "distinct"

    def __str__(self):
        rows = "all" if self.rows is None else f"{self.rows}"
        return f"T{self.T}-E{self.E}-K{self.K}-a{self.align}-rows_{rows}-{self.choice}"

    @property
    def num_rows(self):
        a = max(self.align, 1)
        return None if self.rows is None else int(self.T * self.K * self.rows) // a * a

    def rng(self):
        return np.random.default_rng(zlib.crc32(str(self).encode()))

    @remembered
    def experts(self):
        """int32 [T, K].

        distinct: K different experts per token; masked: a third of the tokens have -1; invalid: some indices are
        outside [-1, E); repeated: a token may have an expert twice; cold: only the first third of the experts; one:
        only the last expert.
        """
        rng, shape = self.rng(), (self.T, self.K)
        if self.choice == "one":
            return np.full(shape, self.E - 1, np.int32)
        if self.choice == "cold":
            return rng.integers(0, max(self.E // 3, 1), shape, np.int32)
        if self.choice == "repeated":
            return rng.integers(0, self.E, shape, np.int32)
        if self.choice == "invalid":
            extreme = np.array([-(2**31), -2, self.E, 2**31 - 1])
            experts = rng.integers(-1, self.E, shape)
            return np.where(rng.random(shape) < 0.2, rng.choice(extreme, shape), experts).astype(np.int32)
        experts = np.argsort(rng.random((self.T, self.E)), axis=1)[:, : self.K].astype(np.int32)
        if self.choice == "masked":
            experts[rng.random(self.T) < 1 / 3] = -1
        return experts

    @remembered
    def reference_plan(self):
        return reference.plan(self.experts(), self.E, self.align, self.num_rows)


CASES = [
    *(Case(T, E, min(E, 4), align) for T in (0, 1, 7) for E in (1, 3, 64, 130, 2304) for align in (0, 8)),
    *(Case(7, E, E) for E in (1, 3, 64, 130, 2304)),
    Case(4097, 1, 1, 1),
    Case(4097, 3, 2, 128),
    Case(4097, 64, 8, 8, choice="cold"),
    Case(4097, 130, 6, 128),
    Case(4097, 512, 10, 8, choice="masked"),
    Case(4097, 2304, 36),
    Case(4097, 2304, 36, 8, rows=0.5),
    *(Case(300, 64, 5, a, rows, choice) for a in (0, 1, 8) for rows in (None, 0.7)
      for choice in ("masked", "invalid", "repeated", "cold", "one")),
    Case(300, 64, 5, 128, 0.0),
    Case(300, 64, 5, 8, 3.0, "invalid"),
]  # fmt: skip


def normal(rng, shape, dtype="float32"):
    return rng.standard_normal(shape, dtype=np.float32).astype(jnp.dtype(dtype))


def assert_products_close(got, want, sizes, name):
    """Checks each inner product: the error is at most 2e-6 of `sizes`, its sum of |terms|, plus one rounding of `got`.

    The error relative to the product itself is unbounded, because the terms may cancel.
    """
    got = np.asarray(got)
    assert got.shape == want.shape, f"{name}: got shape {got.shape}, expected {want.shape}"
    allowed = BOUND["float32"] * sizes
    if got.dtype != np.float32:
        allowed = allowed + BOUND[got.dtype.name] * np.abs(want)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
    with np.errstate(invalid="ignore"):
        wrong = np.argwhere(np.abs(got.astype(np.float64) - want) > allowed)
    assert wrong.size == 0, f"{name}: {len(wrong)} inner products are wrong, the first at {wrong[0]}"
