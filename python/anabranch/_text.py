"""Text forms of a value for error messages."""

from typing import Any


def shown(value: Any) -> str:
    """repr(value), truncated to 200 characters; the type's name if repr fails."""
    try:
        text = repr(value)
    except Exception:  # a caller's class may raise anything
        return f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def typed(value: Any) -> str:
    """The type and the repr of a value.

    >>> typed(1)
    'int 1'
    """
    return f"{type(value).__name__} {shown(value)}"
