"""What every error of the library has in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb

import pytest

import manyheads

HOME = Path(manyheads.__file__).parent


@contextmanager
def raises(
    error: type[BaseException] | tuple[type[BaseException], ...], *words: str, match: str | None = None
) -> Iterator[None]:
    """Expect an error of one line, raised by our own code, with these words and this pattern."""
    with pytest.raises(error, match=match) as caught:
        yield
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert message[-1] in ".)", message
    assert "\n" not in message
    *_, (frame, _) = walk_tb(caught.value.__traceback__)
    assert Path(frame.f_code.co_filename).is_relative_to(HOME), frame
