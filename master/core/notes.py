# SPDX-License-Identifier: Apache-2.0
"""Reports to users that are made once: failing parts, warnings, bad records, forced values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Notes:
    """The reports that hold for the whole job.

    Args:
        degraded: reasons by failing part.
        warnings: from workers, about the model and its data.
        forced: values that differ from those of the checkpoint, in words.
        began_with: the source of the initial state (initFrom.path).
        bad_records: how many were reported.
    """

    degraded: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    forced: list[str] = field(default_factory=list)
    began_with: str = ""
    bad_records: int = 0

    def degrade(self, part: str, why: str) -> bool:
        """Record that a part fails, or works again without a reason. False if that is known."""
        if self.degraded.get(part, "") == why:
            return False
        self.degraded[part] = why
        if not why:
            del self.degraded[part]
        return True

    def warn(self, text: str) -> bool:
        """Record a warning. False if it is known: a replacement may report the same."""
        return _add(self.warnings, text)

    def restore(self, warnings: Iterable[str]) -> None:
        """Continue with the warnings of an earlier master."""
        self.warnings = list(warnings)

    def force(self, words: str) -> bool:
        """Record a forced value. False if it is known."""
        return _add(self.forced, words)

    def begin_with(self, source: str) -> bool:
        """Record the source of the initial state. False if it is known."""
        known, self.began_with = self.began_with, source
        return known != source

    def bad_record(self) -> int:
        """Count a bad record; return how many there are."""
        self.bad_records += 1
        return self.bad_records


def _add(known: list[str], text: str) -> bool:
    if text in known:
        return False
    known.append(text)
    return True
