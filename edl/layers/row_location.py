# SPDX-License-Identifier: Apache-2.0
"""Where the rows of layers are that are built or called now. Set by code that trains or loads a model.

A layer cannot be told by an argument: the user's `model()` makes it, and must not depend on it. So these
contexts tell all layers of the process; only `rows_from` is per thread, as a model may be traced on several.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import tensorflow as tf
from keras.src.saving import serialization_lib

# Returns the rows, float32 [n, dim], of an edl.layers.Embedding's ids, int64 [n].
Source = Callable[[Any, tf.Tensor], tf.Tensor]


@contextlib.contextmanager
def rows_elsewhere() -> Iterator[None]:
    """A context in which layers are built without variables: their rows are on servers.

    It applies to all threads.
    """
    before, _elsewhere.rows = _elsewhere.rows, True
    try:
        yield
    finally:
        _elsewhere.rows = before


def keep_rows_elsewhere() -> None:
    """Build all further layers of this process as in `rows_elsewhere`."""
    _elsewhere.rows = True


@contextlib.contextmanager
def rows_to_be_loaded() -> Iterator[None]:
    """A context for building layers without `input_dim` whose rows are loaded with the model's weights later.

    It applies to all threads. Rows are zeros until weights are loaded.

        with edl.layers.rows_to_be_loaded():
            model = my_model.model()
            model(features)  # needed for a custom model class, which is built when it is called
        model.load_weights("model.weights.h5")
    """
    _to_be_loaded.depth += 1
    try:
        yield
    finally:
        _to_be_loaded.depth -= 1


@contextlib.contextmanager
def saved_tables(counts: Callable[[], Mapping[str, int]], where: str = "") -> Iterator[None]:
    """A context in which layers are built with saved tables, to be filled with rows of a job with servers.

    It applies to all threads, and to layers whose rows that job has saved.

    Args:
        counts: returns the number of ids by layer name; called once, if any layer is built.
        where: description of where the rows are; empty: nowhere.
    """
    global _saved
    before, _saved = _saved, SavedTables(cache(counts), where)
    try:
        yield
    finally:
        _saved = before


@contextlib.contextmanager
def rows_from(source: Source) -> Iterator[None]:
    """A context in which layers of this thread get rows that are on servers from `source`."""
    before, _here.source = _here.source, source
    try:
        yield
    finally:
        _here.source = before


class _Elsewhere:
    rows = False


@dataclass(frozen=True)
class SavedTables:
    """Tables of a job with servers. The arguments are those of `saved_tables`."""

    counts: Callable[[], Mapping[str, int]] = dict
    where: str = ""


class _Here(threading.local):
    source: Source | None = None


class _ToBeLoaded:
    depth = 0


_elsewhere, _here, _saved, _to_be_loaded = _Elsewhere(), _Here(), SavedTables(), _ToBeLoaded()


def is_loaded_by_keras() -> bool:
    """Whether this runs inside `keras.models.load_model`.

    It builds the layers of a custom model class before it loads their weights.
    """
    # A private function, as Keras 3 has no public one: keras.config and keras.saving do not expose this.
    return serialization_lib.in_safe_mode() is not None


def are_elsewhere() -> bool:
    """Whether layers are built without variables, because their rows are on servers."""
    return _elsewhere.rows and not _to_be_loaded.depth


def are_to_be_loaded() -> bool:
    """Whether layers get their rows later, with the model's weights."""
    return bool(_to_be_loaded.depth) or is_loaded_by_keras()


def saved() -> SavedTables:
    """The saved tables that layers are built with."""
    return _saved


def source() -> Source | None:
    """The source of rows in this thread; None without `rows_from`."""
    return _here.source
