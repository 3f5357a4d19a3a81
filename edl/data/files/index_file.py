# SPDX-License-Identifier: Apache-2.0
"""Indexes of files, built once: offsets of records and the other results of a scan.

An index lies beside its file (`.NAME.KIND.edl-index`) or, if that directory is not writable, is of a store or
the file is small, in the cache (`$EDL_CACHE`, else `~/.cache/edl`). It is valid for one size and version of
its file, and has a checksum. An index that is invalid, damaged or missing is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edl.data.files.addresses import File
from edl.scratch import unfinished

BESIDE = 1 << 20  # bytes: the index of a smaller file does not lie in the user's directory
_CHUNK = 1 << 20
_HEAD = 4096  # bytes before the index: what it was built from, as JSON


def cached(file: File, kind: str, build: Callable[[], bytes]) -> np.ndarray:
    """The index of a file, as bytes: uint8 [n], memory-mapped if it is stored.

    Args:
        kind: the format of the index, with all options on which it depends.
        build: scans the file.
    """
    kind = hashlib.sha256(kind.encode()).hexdigest()[:12]
    wanted = {"kind": kind, "name": file.name, "size": file.size, "version": file.version}
    if beside := _beside(file, kind):
        del wanted["name"]  # the same directory may have different names on different machines
    places = [place for place in (beside, _in_cache(file, kind)) if place is not None]
    for place in places:
        with contextlib.suppress(OSError, ValueError):
            return _load(place, wanted)
    data = build()
    head = json.dumps(wanted | {"bytes": len(data), "crc": zlib.crc32(data)}).encode()
    for place in places if len(head) < _HEAD else ():
        with contextlib.suppress(OSError):
            _store(place, head.ljust(_HEAD), data)
            break
    return np.frombuffer(data, np.uint8)


def _load(place: Path, wanted: dict[str, object]) -> np.ndarray:
    with open(place, "rb") as stored:
        head = json.loads(stored.read(_HEAD))
        size, crc = head.pop("bytes"), head.pop("crc")
        if place.name.startswith("."):
            head.pop("name", None)
        found = 0
        while chunk := stored.read(_CHUNK):
            found = zlib.crc32(chunk, found)
        if {key: head.get(key) for key in wanted} != wanted or found != crc:
            raise ValueError(f"{place} is the index of a different file, or damaged")
        if stored.tell() != _HEAD + size:
            raise ValueError(f"{place} is truncated")
    if not size:
        return np.zeros(0, np.uint8)
    return np.memmap(place, np.uint8, "r", _HEAD, (size,))


def _store(place: Path, head: bytes, data: bytes) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    # Workers may build the same index at the same time.
    with unfinished(place) as written, open(written, "wb") as file:
        file.write(head)
        file.write(data)


def _beside(file: File, kind: str) -> Path | None:
    if not file.is_local or file.size < BESIDE:
        return None
    path = Path(file.name)
    return path.with_name(f".{path.name}.{kind}.edl-index")


def _in_cache(file: File, kind: str) -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    where = Path(os.environ.get("EDL_CACHE") or base / "edl") / "indexes"
    name = file.name if not file.is_local else os.path.abspath(file.name)
    return where / f"{hashlib.sha256(f'{kind} {name}'.encode()).hexdigest()[:32]}.edl-index"
