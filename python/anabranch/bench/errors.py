"""The error of the benchmarks."""


class BenchError(RuntimeError):
    """This machine lacks what was asked for, or there is no such benchmark; the message says what."""
