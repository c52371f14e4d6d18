"""What messages say of a value."""

from typing import Any


def shown(value: Any) -> str:
    """repr(value), cut where it is long; its type where it has none."""
    try:
        text = repr(value)
    except Exception:  # whatever a caller's class raises
        return f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def typed(value: Any) -> str:
    """Its type and what it is.

    >>> typed(1)
    'int 1'
    """
    return f"{type(value).__name__} {shown(value)}"
