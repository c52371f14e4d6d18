"""Optional packages, and the error message for an import when one of them is missing."""

import contextlib
from collections.abc import Iterator

#: The pip requirement of each optional package, and the extra of pyproject.toml that contains it.
OPTIONAL = {
    "jax": ("jax>=0.10", "jax"),
    "flax": ("flax>=0.12.1", "jax"),
    "torch": ("torch>=2.9", "torch"),
    "transformers": ("transformers>=5.9", "transformers"),
}


def explain(what: str, error: ImportError) -> str:
    """The reason why an import failed, with the command that installs a missing optional package.

    >>> explain("anabranch.jax.nnx", ModuleNotFoundError("No module named 'flax'", name="flax"))
    "anabranch.jax.nnx needs flax, which is not installed: pip install 'flax>=0.12.1' (extra: jax)"
    """
    if error.name not in OPTIONAL or not isinstance(error, ModuleNotFoundError):
        return f"{what}: {error}"
    requirement, extra = OPTIONAL[error.name]
    return f"{what} needs {error.name}, which is not installed: pip install '{requirement}' (extra: {extra})"


@contextlib.contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Wraps imports: a missing optional package raises a ModuleNotFoundError that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        raise ModuleNotFoundError(explain(what, error), name=error.name) from None
