"""Turns Ctrl-C and SIGTERM into a request that the training loop checks after each step."""

import signal
from types import FrameType


class StopRequest:
    """Inside `with`, the first signal sets `requested`; a second one has Python's default effect."""

    signals = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.requested = False

    def __enter__(self) -> "StopRequest":
        self._before = {number: signal.signal(number, self._request) for number in self.signals}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.__exit__()
