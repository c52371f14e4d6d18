"""`python -m jax_train`, from the folder `examples`."""

import sys

from jax_train.config import Config, parse
from run_error import needs, run_main


def train(config: Config) -> None:
    """Trains."""
    with needs("demo"):
        from jax_train.train import run
    run(config)


if __name__ == "__main__":
    sys.exit(run_main("jax_train", lambda: train(parse())))
