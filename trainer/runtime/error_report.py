"""An error of the user's code in words that can be sent, printed and written, whatever it is.

Promise: nothing here raises. An error may have a `__str__` that fails, characters that no encoding has, or
many megabytes of text; what comes out is valid UTF-8, and short enough for a person.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import edl
from edl.errors import EdlError

OURS = Path(edl.__file__).parent
LIBRARIES = frozenset({"site-packages", "dist-packages", "lib-dynload"})
STANDARD = Path(traceback.__file__).parent  # Python's own library
# Errors that code makes by itself. What files, networks and memory do (OSError, MemoryError) may pass.
MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, NotImplementedError,
    RecursionError, SyntaxError, SystemExit, TypeError, ValueError,
)  # fmt: skip
MISTAKES_OF_TENSORFLOW = frozenset({"InvalidArgumentError", "UnimplementedError"})
MOST_WHY = 2_000  # characters
MOST_TRACEBACK = 20_000
MOST_LINES = 6  # of a sentence that goes over several of them
COLOR = re.compile(r"\x1b\[[0-9;]*m")
# Keras puts what a layer has raised between where that was and what the layer was given.
IN_A_LAYER = re.compile(
    r"Exception encountered when calling (?P<call>[^\n]+)\.\n\n(?P<what>.*?)(\n\nArguments received by |\Z)",
    re.S,
)
# What TensorFlow says of itself, about its words.
OF_TENSORFLOW = re.compile(r"\{\{function_node [^}]*\}\} ?| ?\[Op:\w+\](?: name: ?)?")


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
    return clean(f"{type(error).__name__}: {_said(text)}".removesuffix(": "), MOST_WHY)


def located(error: BaseException) -> str:
    """Where in the user's code the error was raised, such as `mine.py, line 7, in model`; empty: nowhere."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}, line {error.lineno}"
    found = ""
    for cause in _causes(error):
        for file, line, function in _frames(cause.__traceback__):
            if not _is_of_a_library(Path(file)):
                found = f"{Path(file).name}, line {line}, in {function}"
    return found


def comes_again(error: BaseException) -> bool:
    """Whether it is a mistake of the code, which every worker would make that runs it."""
    if any(isinstance(cause, OSError | MemoryError) for cause in _causes(error)):
        return isinstance(error, ImportError)
    return isinstance(error, MISTAKES) or type(error).__name__ in MISTAKES_OF_TENSORFLOW


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and those that it was raised from, the first one last."""
    seen: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in seen:
        seen.append(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    yield from seen


def _frames(found: TracebackType | None) -> Iterator[tuple[str, int, str]]:
    while found is not None:
        code = found.tb_frame.f_code
        yield code.co_filename, found.tb_lineno, code.co_name
        found = found.tb_next


def _is_of_a_library(file: Path) -> bool:
    if file.name.startswith("<") or LIBRARIES & set(file.parts) or file.is_relative_to(STANDARD):
        return True
    return file.is_relative_to(OURS) and file.relative_to(OURS).parts[0] != "zoo"  # models are user code


def _said(text: str) -> str:
    """What an error's text says first, without what libraries put around it."""
    text, where = COLOR.sub("", text).strip(), ""
    if found := IN_A_LAYER.match(text):
        text, where = found["what"], f" (in {found['call']})"
    return _sentence(OF_TENSORFLOW.sub("", text)) + where


def _sentence(text: str) -> str:
    """The lines of a text until a sentence ends with one of them, or a paragraph does."""
    lines: list[str] = []
    for line in text.strip().splitlines()[:MOST_LINES]:
        if line.strip():
            lines.append(line.strip())
        elif not lines[-1].endswith(":"):
            break
        if lines[-1].endswith((".", "!", "?")):
            break
    return " ".join(lines).removesuffix(".")


def traced(error: BaseException) -> str:
    """The error with its traceback."""
    try:
        text = COLOR.sub("", "".join(traceback.format_exception(error)))
    except Exception as another:  # as RecursionError, of causes that go in circles
        text = f"{type(error).__name__} (its traceback cannot be formatted: {type(another).__name__})"
    return clean(text, MOST_TRACEBACK)


def clean(text: str, most: int) -> str:
    """As valid UTF-8, and with its middle left out when there is too much of it."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} ... [{len(text) - 2 * half:,} characters left out] ... {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
