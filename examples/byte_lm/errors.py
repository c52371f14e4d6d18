"""The mistakes that a user can make."""


class RunError(ValueError):
    """The options, the corpus and the out folder do not go together; the message says why, no traceback is needed."""
