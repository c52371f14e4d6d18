"""The corpus: Python source found on the machine, split by file, and batches that are a function of the step number."""

import dataclasses
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

from run_error import RunError, as_run_error

#: Excluded folders: tests, installed packages, and generated tables.
SKIPPED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data"}
)
#: One file in this many is held out.
HELD_OUT_SHARE = 10
#: Ends every file. Python source has no zero byte of its own.
END_OF_FILE = b"\0"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training text, and held-out text that no training step reads.

    Attributes:
      train: uint8 [N], the concatenated training files, each followed by a zero byte.
      held_out: uint8 [M], the held-out files in the same form.
      train_files, held_out_files: their paths, relative to the corpus folder.
      fingerprint: changes with any byte of the text and with the split.
    """

    train: np.ndarray
    held_out: np.ndarray
    train_files: tuple[str, ...]
    held_out_files: tuple[str, ...]
    fingerprint: str


def stdlib_folder() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_held_out(name: str) -> bool:
    """Whether the file at this relative path is held out; equal on every machine and Python version."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_SHARE == 0


def load_corpus(folder: Path) -> Corpus:
    """Reads every `*.py` below `folder` in the order of paths, without empty files and duplicates.

    Raises:
      RunError: no training file or no held-out file is found.
    """
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    names: dict[bool, list[str]] = {False: [], True: []}
    seen = set()
    for name, path in sorted((path.relative_to(folder).as_posix(), path) for path in folder.rglob("*.py")):
        if SKIPPED_FOLDERS.intersection(name.split("/")[:-1]) or not path.is_file():
            continue
        with as_run_error(f"corpus: could not read {path}"):
            text = path.read_bytes()
        if not text.strip() or text in seen:
            continue
        seen.add(text)
        texts[is_held_out(name)].append(text + END_OF_FILE)
        names[is_held_out(name)].append(name)
    if not texts[False] or not texts[True]:
        raise RunError(
            f"corpus: got {len(names[False])} training and {len(names[True])} held-out files in {folder}, "
            "expected at least one of each"
        )
    train, held_out = b"".join(texts[False]), b"".join(texts[True])
    fingerprint = hashlib.sha256(hashlib.sha256(train).digest() + hashlib.sha256(held_out).digest()).hexdigest()
    return Corpus(
        np.frombuffer(train, np.uint8),
        np.frombuffer(held_out, np.uint8),
        tuple(names[False]),
        tuple(names[True]),
        fingerprint[:16],
    )


def windows(text: np.ndarray, starts: np.ndarray, seq: int) -> np.ndarray:
    """uint8 [B, seq + 1]: seq bytes to read from each of `starts` [B], and the byte after them."""
    return text[starts[:, None] + np.arange(seq + 1)]


def training_batch(text: np.ndarray, step: int, batch: int, seq: int, seed: int) -> np.ndarray:
    """uint8 [batch, seq + 1], windows at random positions that depend on the arguments alone.

    So a resumed run reads the batches of an uninterrupted one.
    """
    starts = np.random.default_rng((seed, step)).integers(0, len(text) - seq, size=batch)
    return windows(text, starts, seq)


def held_out_starts(text: np.ndarray, seq: int, limit: int) -> np.ndarray:
    """int [W]: starts of at most `limit` windows that predict different bytes, spread evenly over the text.

    They are at least 1, so that each predicted byte has the two previous bytes that a trigram reads.
    """
    count = (len(text) - 2) // seq
    chosen = np.unique(np.linspace(0, count - 1, min(limit, count)).astype(int))
    return 1 + chosen * seq
