# SPDX-License-Identifier: Apache-2.0
"""Errors of the user's code, of any kind, as text that can be sent, printed and written.

Promise: no function here raises. An error may have a `__str__` that fails, characters that no encoding has,
or many megabytes of text; the result is valid UTF-8, and short enough to read.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, NoReturn

import edl
from edl import errors
from edl.errors import EdlError

OURS = Path(edl.__file__).parent
LIBRARIES = frozenset({"site-packages", "dist-packages", "lib-dynload"})
STANDARD = Path(traceback.__file__).parent  # Python's own library
# Errors that the code itself causes. Those of files, networks and memory (OSError, MemoryError) may pass.
MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    RecursionError,
    SyntaxError,
    SystemExit,
    TypeError,
    ValueError,
)
MISTAKES_OF_TENSORFLOW = frozenset({"InvalidArgumentError", "UnimplementedError"})
# Errors of TensorFlow, CUDA, cuBLAS and cuDNN that find too little free memory on a GPU.
NO_GPU_MEMORY = re.compile(
    r"no BLAS support|without BLAS support|CUDA_ERROR_OUT_OF_MEMORY|Status: out of memory"
    r"|(CUBLAS|CUDNN)_STATUS_ALLOC_FAILED|Out of memory while trying to allocate"
    r"|(OOM when allocating|failed to allocate memory)(?=.*GPU)|GPU.*failed to allocate memory",
    re.IGNORECASE,
)
GPU_MEMORY_ADVICE = (
    "lower training.batchSize or raise training.accumulateSteps; if workers share a GPU, set "
    "worker.gpuMemory=growth or a larger local.gpusPerWorker"
)
MAX_WHY = 2_000  # characters
MAX_TRACEBACK = 20_000
MAX_LINES = 6  # of a sentence over several lines
COLOR = re.compile(r"\x1b\[[0-9;]*m")
# Keras puts a layer's error between its place and the layer's arguments.
IN_A_LAYER = re.compile(
    r"Exception encountered when calling (?P<call>[^\n]+)\.\n\n(?P<what>.*?)(\n\nArguments received by |\Z)",
    re.S,
)
# Marks that TensorFlow adds to its messages.
OF_TENSORFLOW = re.compile(r"\{\{function_node [^}]*\}\} ?| ?\[Op:\w+\](?: name: ?)?")


@dataclass(frozen=True)
class Relayed:
    """The description of an error that was raised in a different process, where its traceback is.

    Args:
        kind: the class in `edl.errors`; empty for other errors.
        why, location, traceback, reproducible: the results of this module's functions.
    """

    kind: str
    why: str
    location: str
    traceback: str
    reproducible: bool


class RelayedError(Exception):
    """An error of the user's code in a different process.

    The functions of this module describe it as they would have described the original there.
    """

    def __init__(self, relayed: Relayed):
        super().__init__(relayed.why)
        self.relayed = relayed


def relay(error: BaseException) -> Relayed:
    """Describe an error, to be sent to a different process."""
    kind = type(error).__name__ if isinstance(error, EdlError) else ""
    facts = error_location(error), format_traceback(error), is_reproducible(error)
    return Relayed(kind, format_error(error), *facts)


def raise_relayed(relayed: Relayed) -> NoReturn:
    """Raise the error of a different process.

    Raises:
        RelayedError: the error, if it is not one of `edl.errors`.
        EdlError: the error, in its own class, if it is one of `edl.errors`.
    """
    if not relayed.kind:
        raise RelayedError(relayed)
    error: EdlError = getattr(errors, relayed.kind, EdlError)(relayed.why)
    raise error


def format_error(error: BaseException) -> str:
    """The error in one line, for a reason; the text of an EdlError is used unchanged."""
    if isinstance(error, RelayedError):
        return error.relayed.why
    try:
        text = str(error)
    except Exception as second:
        text = f"(its __str__ raises {type(second).__name__})"
    if isinstance(error, EdlError):
        return clean(text, MAX_WHY)
    if isinstance(error, SystemExit):
        return clean(f"the model's code has called sys.exit({text})", MAX_WHY)
    return clean(f"{type(error).__name__}: {_first_sentence(text)}".removesuffix(": "), MAX_WHY)


class Place(NamedTuple):
    """A line of the user's code.

    Args:
        function: the function that the line is in; empty outside functions.
    """

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        inside = f", in {self.function}" if self.function else ""
        return f"{Path(self.file).name}, line {self.line}{inside}"


def error_place(error: BaseException) -> Place | None:
    """The line of the user's code that raised the error; None if no line of it did."""
    if isinstance(place := getattr(error, "place", None), Place):  # known without a traceback
        return place
    if isinstance(error, SyntaxError) and error.filename:
        return Place(error.filename, error.lineno or 1)
    found = None
    for cause in _causes(error):
        for file, line, function in _frames(cause.__traceback__):
            if not _is_of_a_library(Path(file)):
                found = Place(file, line, "" if function == "<module>" else function)
    return found


def error_location(error: BaseException) -> str:
    """Return the place in the user's code that raised the error; empty if no such place exists.

    It reads like `mine.py, line 7, in model`.
    """
    if isinstance(error, RelayedError):
        return error.relayed.location
    place = error_place(error)
    return "" if place is None else str(place)


def is_reproducible(error: BaseException) -> bool:
    """Whether the error is a mistake in the code, which every worker that runs the code would repeat."""
    if isinstance(error, RelayedError):
        return error.relayed.reproducible
    if any(isinstance(cause, OSError | MemoryError) for cause in _causes(error)):
        return isinstance(error, ImportError)
    return isinstance(error, MISTAKES) or type(error).__name__ in MISTAKES_OF_TENSORFLOW


def lack_of_gpu_memory(error: BaseException) -> str:
    """Describe an error of TensorFlow for want of memory on a GPU, in one line; empty for other errors."""
    for cause in _causes(error):
        if "OpError" not in {kind.__name__ for kind in type(cause).__mro__}:
            continue
        for line in str(cause).splitlines():
            if NO_GPU_MEMORY.search(line):
                said = OF_TENSORFLOW.sub("", line).strip()
                return clean(f"the GPU's memory is not enough: {said}; {GPU_MEMORY_ADVICE}", MAX_WHY)
    return ""


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and the errors that it was raised from, the first one last."""
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
    if file.suffix != ".py" or LIBRARIES & set(file.parts) or file.is_relative_to(STANDARD):
        return True
    return file.is_relative_to(OURS) and file.relative_to(OURS).parts[0] != "zoo"  # models are user code


def _first_sentence(text: str) -> str:
    """The first sentence of an error's text, without what libraries put around it."""
    text, where = COLOR.sub("", text).strip(), ""
    if found := IN_A_LAYER.match(text):
        text, where = found["what"], f" (in {found['call']})"
    return _sentence(OF_TENSORFLOW.sub("", text)) + where


def _sentence(text: str) -> str:
    """The lines of a text up to the end of its first sentence or paragraph."""
    lines: list[str] = []
    for line in text.strip().splitlines()[:MAX_LINES]:
        if line.strip():
            lines.append(line.strip())
        elif not lines[-1].endswith(":"):
            break
        if lines[-1].endswith((".", "!", "?")):
            break
    return " ".join(lines).removesuffix(".")


def format_traceback(error: BaseException) -> str:
    """The error with its traceback, from the first line of the user's code on, if it has one."""
    if isinstance(error, RelayedError):
        return error.relayed.traceback
    try:
        found = traceback.TracebackException.from_exception(error)
        _drop_callers(found)
        text = COLOR.sub("", "".join(found.format()))
    except Exception as second:  # such as RecursionError, if an error is its own cause
        text = f"{type(error).__name__} (its traceback cannot be formatted: {type(second).__name__})"
    return clean(text, MAX_TRACEBACK)


def _drop_callers(found: traceback.TracebackException) -> None:
    """Drop the frames that lead to the user's code, such as those of the import of a model's file.

    An error without a line of the user's code, which explains a different error, gets the lines of that one.
    """
    if not (cause := found.__cause__) and not found.__suppress_context__:
        cause = found.__context__
    if cause is not None:
        _drop_callers(cause)
    if (first := _first_of_user(found)) is not None:
        del found.stack[:first]
    elif cause is not None and cause is found.__cause__ and _first_of_user(cause) is not None:
        found.stack, found.__cause__ = cause.stack, cause.__cause__


def _first_of_user(found: traceback.TracebackException) -> int | None:
    """The index of the first frame in the user's code; None if no frame is."""
    of_user = (n for n, frame in enumerate(found.stack) if not _is_of_a_library(Path(frame.filename)))
    return next(of_user, None)


def clean(text: str, most: int) -> str:
    """The text as valid UTF-8, its middle left out if it is longer than `most` characters."""
    if len(text) > most:
        half = most // 2
        text = f"{text[:half]} ... [{len(text) - 2 * half:,} characters left out] ... {text[-half:]}"
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def caller() -> str:
    """The line of the user's code that has called edl, such as `train.py, line 12`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and Path(frame.f_code.co_filename).is_relative_to(OURS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
