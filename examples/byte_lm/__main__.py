"""`python -m byte_lm`, from the folder `examples`."""

import sys


def start() -> int:
    """Says that it has begun, since importing JAX takes seconds, and runs the demo."""
    print("byte_lm: loading JAX and the corpus", file=sys.stderr, flush=True)
    from byte_lm.train import main

    return main()


sys.exit(start())
