# SPDX-License-Identifier: Apache-2.0
"""Where a record lies: the file and its number there, for messages about it.

A reader that knows it has a method `place(index)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def place(records: Any, index: int) -> str:
    """The file of a record, and its number there: "f.csv: record 7"; empty if the reader does not know."""
    find = getattr(records, "place", None)
    return str(find(index)) if find is not None else ""


def in_files(names: Sequence[str], counts: Sequence[int] | np.ndarray) -> Callable[[int], str]:
    """The method `place` of a reader over the records of several files, one after the other.

    Args:
        names: the files.
        counts: the number of records of each.
    """
    ends = np.cumsum(np.asarray(counts, np.int64))

    def place(index: int) -> str:
        file = int(np.searchsorted(ends, index, "right"))
        return f"{names[file]}: record {index - (int(ends[file - 1]) if file else 0)}"

    return place
