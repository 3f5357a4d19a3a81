# SPDX-License-Identifier: Apache-2.0
"""What a command prints, as it prints it: lines of JSON, each with the moment at which it came."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

T = TypeVar("T")
Seen = Sequence[tuple[float, Any]]  # monotonic seconds, and the line


class Lines:
    """The lines of a command that runs until it is closed, such as a watch or `tail -f`."""

    def __init__(self, command: Sequence[object], environment: Mapping[str, str] | None = None):
        self._command = [str(word) for word in command]
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        self._seen: list[tuple[float, Any]] = []
        self._ended = False
        self._news = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            came = time.monotonic()
            with self._news:
                self._seen.append((came, json.loads(line)))
                self._news.notify_all()
        with self._news:
            self._ended = True
            self._news.notify_all()

    @property
    def seen(self) -> list[tuple[float, Any]]:
        """All lines so far."""
        with self._news:
            return list(self._seen)

    def until(self, find: Callable[[Seen], T | None], seconds: float) -> T:
        """What `find` finds in the lines so far, as soon as it finds anything.

        Raises:
            TimeoutError: it finds nothing within so many seconds, or before the command ends.
        """
        deadline = time.monotonic() + seconds
        with self._news:
            while (found := find(self._seen)) is None:
                left = deadline - time.monotonic()
                if left <= 0 or self._ended:
                    last = self._seen[-1] if self._seen else "nothing"
                    raise TimeoutError(f"not seen within {seconds:g} s: {' '.join(self._command)}: {last}")
                self._news.wait(left)
            return found

    def when(self, so: Callable[[Any], object], seconds: float) -> float:
        """When the first line came that fulfills a condition.

        Raises:
            TimeoutError: no such line within so many seconds, or before the command ends.
        """
        return self.until(lambda seen: next((at for at, line in seen if so(line)), None), seconds)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
