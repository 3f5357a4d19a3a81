"""An error of the user's code in words that can be sent, printed and written, whatever it is.

Promise: nothing here raises. An error may have a `__str__` that fails, characters that no encoding has, or
many megabytes of text; what comes out is valid UTF-8, and short enough for a person.
"""

from __future__ import annotations

import traceback

from edl.errors import EdlError

MOST_WHY = 2_000  # characters
MOST_TRACEBACK = 20_000


def described(error: BaseException) -> str:
    """The error in one line, for a reason; one in our own words is taken as it is."""
    try:
        text = str(error)
    except Exception as another:
        text = f"(its __str__ raises {type(another).__name__})"
    if isinstance(error, EdlError):
        return clean(text, MOST_WHY)
    if isinstance(error, SystemExit):
        return clean(f"the model's code has called sys.exit({text})", MOST_WHY)
    first = next(iter(text.strip().splitlines()), "")
    return clean(f"{type(error).__name__}: {first}".removesuffix(": "), MOST_WHY)


def traced(error: BaseException) -> str:
    """The error with its traceback."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as another:  # as RecursionError, of causes that go in circles
        text = f"{type(error).__name__} (its traceback cannot be formatted: {type(another).__name__})"
    return clean(text, MOST_TRACEBACK)


def clean(text: str, most: int) -> str:
    """As valid UTF-8, and with its middle left out when there is too much of it."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} ... [{len(text) - 2 * half:,} characters left out] ... {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
