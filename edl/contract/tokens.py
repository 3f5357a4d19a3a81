# SPDX-License-Identifier: Apache-2.0
"""The tokens that a master accepts: the current one, and those that it had before.

A token is changed while workers run that know the old one. In a cluster it is in a mounted Secret, which the
kubelet keeps up to date: the file is the current token, and FILE-kept, if it is there, has those of the
release's earlier masters, one in a line (edl.master.cluster.kept_tokens).

From each token, a read token is derived that only permits reading the rows of parameter servers. The job's
token cannot be computed from it.

Promise: calls with one of these tokens are accepted, and no others. A change of the token is reported.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Iterable
from pathlib import Path

FILE, GIVEN = "EDL_TOKEN_FILE", "EDL_TOKEN"  # in the environment: its path, or the token itself
KEPT = "-kept"
MAX_KEPT = 8  # the newest ones
_FOR_READING = b"edl: read rows"


def for_reading(token: str) -> str:
    """The token that permits reading rows, derived from the job's token."""
    return hmac.digest(token.encode(), _FOR_READING, hashlib.sha256).hex()


def token_of_environment() -> str:
    """The job's token: that in the file that the environment names, else the environment's own; or empty."""
    return Tokens.of_environment(os.environ.get(GIVEN, ""), str).current


class Tokens:
    """The tokens that one master accepts.

    Args:
        given: the token to use if there is no file, or if the file cannot be read.
        file: path of the file with the current token.
        tell: is called with a message when the token has changed.
    """

    def __init__(self, given: str, file: Path | None = None, tell: Callable[[str], object] = str):
        self._file, self._tell = file, tell
        self._current = given
        self._before: list[str] = []  # the newest one last
        self._read()

    @classmethod
    def of_environment(cls, given: str, tell: Callable[[str], object]) -> Tokens:
        """Use the token `given`, and follow the file that the environment names, if it names one."""
        path = os.environ.get(FILE)
        return cls(given, Path(path) if path else None, tell)

    @property
    def current(self) -> str:
        """The token to send now: the file's if there is one, as a Secret may change while the job runs."""
        self._read()
        return self._current

    def accept(self, authorization: str) -> bool:
        """Whether a call with this authorization header is accepted."""
        return _is_one_of(authorization, self.known())

    def accept_for_reading(self, authorization: str) -> bool:
        """Whether a call with this authorization header may read rows."""
        return _is_one_of(authorization, map(for_reading, self.known()))

    def known(self) -> list[str]:
        """All tokens that are accepted, the current one last."""
        self._read()
        kept = _text(self._file.with_name(self._file.name + KEPT)).split() if self._file is not None else []
        earlier = [token for token in (*kept, *self._before) if token != self._current]
        return [*dict.fromkeys(earlier), *filter(None, [self._current])]

    def _read(self) -> None:
        text = _text(self._file)
        if text and text != self._current:
            if self._current:
                self._tell("the token has changed; those before it are accepted, too")
                self._before = [*self._before, self._current][-MAX_KEPT:]
            self._current = text


def _is_one_of(authorization: str, tokens: Iterable[str]) -> bool:
    said = authorization.encode()
    return any(hmac.compare_digest(said, f"Bearer {token}".encode()) for token in tokens)


def _text(file: Path | None) -> str:
    try:
        return file.read_text(encoding="utf-8").strip() if file is not None else ""
    except (OSError, ValueError):
        return ""
