"""The baseline: an interpolated byte trigram, the probability of a byte given the two before it."""

import numpy as np


class Trigram:
    """Witten-Bell interpolated trigram over bytes.

    With c the count of a context, c(b) that of b after it, n the number of different bytes seen after it, and P' the
    model of the context without its first byte (for the empty context P' = 1 / 256):

        P(b | context) = (c(b) + n P'(b)) / (c + n)

    so a rare context relies on the shorter one. An unseen context has c = n = 0 and uses P' itself.
    Source: Witten and Bell 1991, "The zero-frequency problem", method C.

    Args:
      text: uint8 [N], the training text, N >= 3.

    Example:
      >>> import numpy as np
      >>> model = Trigram(np.frombuffer(b"ab" * 10 + b"ac", np.uint8))
      >>> round(float(model.probability(*map(ord, "bab"))), 2)
      0.89
    """

    def __init__(self, text: np.ndarray):
        code = text.astype(np.int64)
        counts = np.bincount((code[:-2] << 16) | (code[1:-1] << 8) | code[2:], minlength=1 << 24)
        three = counts.astype(np.int32).reshape(256, 256, 256)
        two = np.bincount((code[:-1] << 8) | code[1:], minlength=1 << 16).reshape(256, 256)
        one = np.bincount(code, minlength=256)
        #: For each order: how often a byte follows a context [..., 256], the contexts' counts and followers [...].
        self.orders = [(count, count.sum(-1), np.count_nonzero(count, axis=-1)) for count in (one, two, three)]

    def probability(self, first: np.ndarray, second: np.ndarray, byte: np.ndarray) -> np.ndarray:
        """float64: P(byte | first, second), elementwise over integer arrays of one shape."""
        p = np.full(np.shape(byte), 1 / 256)
        for (count, total, followers), context in zip(self.orders, ((), (second,), (first, second)), strict=True):
            c, n = total[context], followers[context]
            p = np.where(c > 0, (count[(*context, byte)] + n * p) / np.maximum(c + n, 1), p)
        return p

    def bits_per_byte(self, text: np.ndarray, positions: np.ndarray) -> float:
        """Mean of -log2 P of the bytes of `text` at `positions` (each 2 or later)."""
        p = self.probability(text[positions - 2], text[positions - 1], text[positions])
        return float(-np.log2(p).mean())
