"""How tests wait for something that must happen: for so long that only a hang takes longer."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 600  # seconds


def wait_until(happened: Callable[[], bool]) -> None:
    """Return as soon as a condition holds."""
    end = time.monotonic() + HANG
    while not happened():
        if time.monotonic() > end:
            raise TimeoutError(f"{happened.__qualname__} did not hold within {HANG} s.")
        time.sleep(0.01)
