"""In which framework a test calls an operation: the same cases and the same checks for each.

`both` marks a test, and `BOTH` a module, that runs in every one. A check asks `in_torch()` where it calls.
"""

import pytest

FRAMEWORKS = ("jax", "torch")
#: For the tests of a module, as pytestmark.
BOTH = [
    pytest.mark.usefixtures("platform", "framework"),
    pytest.mark.parametrize("framework", FRAMEWORKS, indirect=True),
]
_current = "jax"


def both(test):
    """Runs a test in every framework."""
    return pytest.mark.usefixtures("framework")(pytest.mark.parametrize("framework", FRAMEWORKS, indirect=True)(test))


def in_torch():
    """Whether the running test is to call the operations on torch's tensors."""
    return _current == "torch"


def choose(name):
    """Calls go to a framework from now on; for the fixture."""
    global _current
    _current = name
