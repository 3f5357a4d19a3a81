# SPDX-License-Identifier: Apache-2.0
"""Comparison of a model with what a warm start loads into it. What does not fit is refused by name."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py

from edl.checkpoints import CheckpointError
from edl.errors import ModelError
from edl.trainer.embedding.interfaces import Table
from edl.trainer.embedding.saved_rows import weights_in

MOST_NAMED = 5  # variables in a message

Shape = tuple[int, ...]


def refuse_rows(place: str, table: Table, dim: int | None) -> None:
    """Refuse rows that do not fit the table.

    Args:
        dim: the dimension of the existing rows; None without rows.

    Raises:
        ModelError: they are not those of the table.
    """
    if dim != table.dim:
        there = "and missing there" if dim is None else f"and of length {dim} there"
        raise ModelError(
            f"{place} does not fit this model: the rows of {table.name!r} are of length {table.dim} here, "
            f"{there}. The names of their layers identify the tables"
        )


def kind_of(dtype: str, shape: Shape) -> str:
    """The dtype and shape of a variable, for messages."""
    return f"{dtype} {list(shape)}"


def refuse_variables(place: str, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Refuse variables that are missing there, or of a different kind.

    Raises:
        ModelError: what is here is not there, or is of another kind.
    """
    wrong = [
        f"{name} is {kind} here, {f'and {there[name]} there' if name in there else 'and missing there'}"
        for name, kind in here.items()
        if there.get(name) != kind
    ]
    if wrong:
        more = f"; and {len(wrong) - MOST_NAMED} more" if len(wrong) > MOST_NAMED else ""
        raise ModelError(f"{place} does not fit this model: {'; '.join(wrong[:MOST_NAMED])}{more}")


def stored_in(path: Path) -> dict[str, str]:
    """The kinds of the variables in a file of Keras, without the optimizer's, by their names in the file.

    Raises:
        CheckpointError: Keras has not saved this file.
    """
    found: dict[str, str] = {}

    def note(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and not name.startswith("optimizer/"):
            layer = item.parent.attrs.get("name", "")
            told = f"variable {name.rpartition('/')[2]} of layer {layer} ({name})" if layer else name
            found[told] = kind_of(str(item.dtype), item.shape)

    try:
        with weights_in(path) as file:
            file.visititems(note)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"initFrom.path: {path.name} is not a file that Keras has saved: {error}"
        ) from error
    return found
