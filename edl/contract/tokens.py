"""The tokens that a master accepts: the current one, and the one before it.

A token is changed while workers run that know the old one. In a cluster it is in a mounted Secret, which the
kubelet keeps up to date: the file is the current token, and FILE-previous, if it is there, the one before it.

Promise: whoever has one of the two is let in, and nobody else. That the token has changed is told.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable
from pathlib import Path

FILE = "EDL_TOKEN_FILE"  # in the environment
PREVIOUS = "-previous"


class Tokens:
    """Those of one master.

    Args:
        given: the token where there is no file, or it cannot be read.
        file: with the current token.
        tell: takes a sentence when the token has changed.
    """

    def __init__(self, given: str, file: Path | None = None, tell: Callable[[str], object] = str):
        self._file, self._tell = file, tell
        self._current, self._before = given, ""
        self._read()

    @classmethod
    def of_environment(cls, given: str, tell: Callable[[str], object]) -> Tokens:
        path = os.environ.get(FILE)
        return cls(given, Path(path) if path else None, tell)

    @property
    def current(self) -> str:
        self._read()
        return self._current

    def accept(self, authorization: str) -> bool:
        """Whether that is the header of a call that is to be let in."""
        self._read()
        known = [token for token in (self._current, self._before, self._previous()) if token]
        said = authorization.encode()
        return any(hmac.compare_digest(said, f"Bearer {token}".encode()) for token in known)

    def _read(self) -> None:
        text = _text(self._file)
        if text and text != self._current:
            if self._current:
                self._tell("the token has changed; the one before it is accepted, too")
            self._before, self._current = self._current, text

    def _previous(self) -> str:
        return _text(self._file.with_name(self._file.name + PREVIOUS)) if self._file is not None else ""


def _text(file: Path | None) -> str:
    try:
        return file.read_text(encoding="utf-8").strip() if file is not None else ""
    except (OSError, ValueError):
        return ""
