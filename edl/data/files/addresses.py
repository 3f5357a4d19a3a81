# SPDX-License-Identifier: Apache-2.0
"""Files of data by address: a path, a list, a glob, a directory, or an address that fsspec supports.

Promise: a file that differs from the file that was found when the job began is refused, and none of its bytes
are returned. Its version is its size with its time of modification, or with the etag of an object store, and
it is compared after each read. No file stays open between reads, so 10,000 files need one open handle.
"""

from __future__ import annotations

import glob
import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from stat import S_ISDIR
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import url2pathname

from edl.errors import DataError
from edl.object_store import client, credentials_refused, forget_client, short, speaking

T = TypeVar("T")
Address = str | os.PathLike[str]
Addresses = Address | Sequence[Address]

PATIENCE = 120.0  # seconds for which reads of a store that does not answer are repeated
LISTING = 15.0  # seconds for which the search for files is repeated
LONGEST_PAUSE = 15.0  # seconds between two attempts
NAMED = 5  # files of a directory that a message lists
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError)  # permanent refusals of a store
_WRONG = (ValueError, TypeError, ImportError, AttributeError)  # the cause is the address, not the store
_SHARD = re.compile(r"-\d{5,}-of-\d{5,}$")  # as in train.tfrecord-00003-of-00100

log = logging.getLogger("edl.data")


@dataclass(frozen=True, slots=True)
class File:
    """A file as it was when the job began.

    Args:
        name: its path or address, as messages name it.
        size: bytes.
        version: identifies its content together with `size`.
    """

    name: str
    size: int
    version: str

    @property
    def is_local(self) -> bool:
        return "://" not in self.name

    @contextmanager
    def open(self, what: str = "") -> Iterator[Opened]:
        """Open the file for reading, and compare its version at the end.

        Args:
            what: the records that are read, such as "records 5 to 9", for messages.

        Raises:
            DataError: the file has changed since it was found, or cannot be read.
        """
        opened: Opened | None = None
        try:
            opened = _Local(self) if self.is_local else _Remote(self)
            yield opened
        except OSError as error:
            self.refuse_changed(what)  # the likely cause of a failed read
            raise DataError(f"{self._named(what)}: cannot be read: {_reason(error)}") from error
        except Exception:
            self.refuse_changed(what)
            raise
        else:
            self.refuse_changed(what, opened)
        finally:
            if opened is not None:
                opened.close()

    def read(self, start: int, stop: int, what: str = "") -> bytes:
        """Return the bytes [start, stop).

        Raises:
            DataError: the file has changed since it was found, or cannot be read.
        """
        with self.open(what) as file:
            return file.read_at(start, stop)

    def refuse_changed(self, what: str = "", opened: Opened | None = None) -> None:
        """Compare the version of the file with the one that was found when the job began.

        Args:
            what: see `open`.
            opened: this file, if it is open; otherwise a failure to look it up is ignored, because the caller
                reports its own error.

        Raises:
            DataError: the file has changed.
            OSError: `opened` cannot be looked up.
        """
        try:
            found = opened.current() if opened is not None else _one(self.name)
        except FileNotFoundError:
            raise DataError(f"{self._named(what)}: the file has been removed since the job began") from None
        except OSError:
            if opened is None:  # the caller's error says why
                return
            raise
        if (found.size, found.version) != (self.size, self.version):
            how = f"had {self.size} bytes and has {found.size}"
            if found.size == self.size:
                how = f"has the same {self.size} bytes in number, but another time of change or etag"
            raise DataError(
                f"{self._named(what)}: the file was changed or replaced since the job began ({how}); files "
                "must stay as they are while a job reads them"
            )

    def _named(self, what: str) -> str:
        return f"{self.name}: {what}" if what else self.name


class Opened(io.RawIOBase):
    """An open file: a binary stream for libraries, with reads at any position."""

    def __init__(self, file: File):
        super().__init__()
        self.file, self._at = file, 0

    def read_at(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of the file, which must have that many.

        Raises:
            OSError: the file has fewer bytes, or cannot be read.
        """
        raise NotImplementedError

    def current(self) -> File:
        """The file as it is now."""
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def size(self) -> int:
        return self.file.size

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self.file.size)[whence]
        return self._at

    def readinto(self, room: Any) -> int:
        view = memoryview(room).cast("B")
        start = min(self._at, self.file.size)
        data = self.read_at(start, min(start + len(view), self.file.size))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


class _Local(Opened):
    def __init__(self, file: File):
        super().__init__(file)
        self._handle = -1  # a file that cannot be opened is closed, too, when this object goes
        self._handle = os.open(file.name, os.O_RDONLY | os.O_CLOEXEC)

    def read_at(self, start: int, stop: int) -> bytes:
        pieces = []
        while start < stop:  # the kernel returns at most 2 GiB at once
            if not (piece := os.pread(self._handle, stop - start, start)):
                raise OSError(f"the file ends at byte {start}; expected {stop}")
            pieces.append(piece)
            start += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def current(self) -> File:
        return _one(self.file.name) if self.closed else _of_stat(self.file.name, os.fstat(self._handle))

    def close(self) -> None:
        if not self.closed and self._handle >= 0:
            os.close(self._handle)
        super().close()


class _Remote(Opened):
    """An object of a store. A read that fails is repeated, with pauses, for up to `PATIENCE` seconds."""

    def read_at(self, start: int, stop: int) -> bytes:
        if start >= stop:
            return b""

        def get() -> bytes:
            with speaking():
                found, path = client(self.file.name)
                data = bytes(found.cat_file(path, start=start, end=stop))
            if len(data) != stop - start:
                if _one(self.file.name).size < stop:
                    raise FileNotFoundError(f"the file ends before byte {stop}")
                raise OSError(f"the store returned {len(data)} of {stop - start} bytes")
            return data

        return _patiently(self.file.name, get)

    def current(self) -> File:
        return _patiently(self.file.name, lambda: _one(self.file.name))


def find(addresses: Addresses, suffixes: Sequence[str] = (), reader: str = "") -> list[File]:
    """The files that the addresses name, in an order that is the same for every worker.

    A list keeps its order. The files of a glob or of a directory are sorted by name; of a directory, these
    are the files at any depth that end with one of the suffixes, without hidden ones.

    Args:
        suffixes: endings of the format's files, in lower case; empty: a directory's files are all taken.
        reader: name of the reader, for messages.

    Raises:
        DataError: no file is found, a file is missing or named twice, or a store cannot be reached.
    """
    before = f"edl.{reader}: " if reader else ""
    if not isinstance(addresses, str | os.PathLike):
        given = list(addresses)
        if not given:
            raise DataError(f"{before}the list of files is empty; expected at least one path or address")
        found = [file for address in given for file in find(address, suffixes, reader)]
        names = [file.name for file in found]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise DataError(f"{before}{twice} is named twice, so its records would be counted twice")
        return found
    name = local_path(os.fspath(addresses))
    if not name:
        raise DataError(f"{before}the address is empty; expected a path, a glob, a directory or an address")
    try:
        found = _found(name, tuple(suffixes)) if "://" not in name else _found_remote(name, tuple(suffixes))
    except FileNotFoundError as error:
        raise DataError(f"{name}: cannot be read: there is no such file or directory") from error
    except OSError as error:
        raise DataError(f"{name}: cannot be read: {_reason(error)}") from error
    return found


def local_path(address: str) -> str:
    """The path of a file:// address; other addresses and paths unchanged."""
    if address.startswith("file://"):
        return url2pathname(urlsplit(address).path)
    return address


def ends_with(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether the name of a file has one of these endings, also before the number of a shard."""
    return _SHARD.sub("", name.lower()).endswith(suffixes)


def is_glob(name: str) -> bool:
    """Whether the name is a pattern."""
    return any(mark in name for mark in "*?[")


def _found(name: str, suffixes: tuple[str, ...]) -> list[File]:
    if is_glob(name) and not Path(name).exists():
        names = [path for path in sorted(glob.glob(name, recursive=True)) if not Path(path).is_dir()]
        if not names:
            raise DataError(f"{name}: no file matches this pattern")
        return [_one(path) for path in names]
    if not Path(name).is_dir():
        return [_one(name)]
    there = sorted(
        os.path.join(folder, file)
        for folder, _, files in os.walk(name, followlinks=True)
        for file in files
        if not _is_hidden(os.path.relpath(os.path.join(folder, file), name))
    )
    return [_one(path) for path in _with_suffix(name, there, suffixes)]


def _found_remote(name: str, suffixes: tuple[str, ...]) -> list[File]:
    try:
        with speaking():
            client(name)
    except OSError as error:  # such as ImportError of s3fs
        raise DataError(f"{name}: {short(error)}") from error
    scheme = name.partition("://")[0]

    def listed() -> dict[str, Any]:
        with speaking():
            found, path = client(name)
            if is_glob(name):
                return dict(found.glob(path, detail=True))
            if found.isfile(path):
                return {path: found.info(path)}
            return dict(found.find(path, detail=True))

    there = {
        f"{scheme}://{path.lstrip('/')}": about
        for path, about in _patiently(name, listed, LISTING).items()
        if about.get("type", "file") == "file"
    }
    if is_glob(name):
        there = {path: about for path, about in there.items() if "/." not in path}  # as glob.glob does
        if not there:
            raise DataError(f"{name}: no file matches this pattern")
        return [_of_info(path, there[path]) for path in sorted(there)]
    if not there:
        raise FileNotFoundError
    root = name.rstrip("/")
    if len(there) == 1 and next(iter(there)).endswith("/" + root.partition("://")[2].lstrip("/")):  # a file
        return [_of_info(path, about) for path, about in there.items()]
    kept = sorted(path for path in there if not _is_hidden(path.removeprefix(root).lstrip("/")))
    return [_of_info(path, there[path]) for path in _with_suffix(name, kept, suffixes)]


def _with_suffix(name: str, there: list[str], suffixes: tuple[str, ...]) -> list[str]:
    kept = [path for path in there if not suffixes or ends_with(path, suffixes)]
    if not kept:
        has = f"has {_some(there)}" if there else "is empty"
        wanted = f" whose name ends with {' or '.join(suffixes)}" if suffixes else ""
        advice = f"; a pattern such as {name.rstrip('/')}/* names others" if there else ""
        raise DataError(f"{name}: the directory has no file{wanted}; it {has}{advice}")
    return kept


def _some(paths: Sequence[str]) -> str:
    names = [path.rstrip("/").rpartition("/")[2] for path in paths[:NAMED]]
    return ", ".join(names) + (f" and {len(paths) - NAMED} more" if len(paths) > NAMED else "")


def _is_hidden(path: str) -> bool:
    """Whether a path below a directory is hidden, or a mark of Hadoop and Spark (_SUCCESS, _temporary)."""
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _one(name: str) -> File:
    """The file as it is now.

    Raises:
        IsADirectoryError: it is a directory.
        OSError: it does not exist, or cannot be read.
    """
    if "://" not in name:
        status = os.stat(name)
        if S_ISDIR(status.st_mode):
            raise IsADirectoryError(f"{name} is a directory")
        return _of_stat(name, status)
    with speaking():
        found, path = client(name)
        return _of_info(name, found.info(path))


def _of_stat(name: str, status: os.stat_result) -> File:
    return File(name, status.st_size, str(status.st_mtime_ns))


def _of_info(name: str, about: dict[str, Any]) -> File:
    marks = (about.get(key) for key in ("ETag", "etag", "generation", "mtime", "LastModified", "created"))
    mark = next((mark for mark in marks if mark), "")
    if isinstance(mark, datetime):  # a listing may have it as a number
        mark = mark.timestamp()
    return File(name, int(about.get("size") or 0), str(mark).strip('"'))


def _patiently(name: str, call: Callable[[], T], patience: float | None = None) -> T:
    """Repeat `call` with growing pauses while the store does not answer, or while credentials are renewed.

    Credentials that have expired while a job reads are read anew for each attempt, from where the store's
    client finds them, such as a mounted Secret.

    Args:
        patience: seconds, for calls at the start of a job, which refuse wrong credentials at once; by default
            `PATIENCE`.

    Raises:
        OSError: the store refuses for good, or does not answer in time.
    """
    deadline, pause = time.monotonic() + (PATIENCE if patience is None else patience), 0.5
    while True:
        try:
            return call()
        except _LASTING as error:
            renews = patience is None and credentials_refused(error)
            if not renews or time.monotonic() + pause > deadline:
                raise
            forget_client(name)
            why = "the store refuses the credentials, next attempt with fresh ones"
            log.warning("%s: %s in %g s: %s", name, why, pause, short(error))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        except OSError as error:
            if isinstance(error.__cause__, _WRONG) or time.monotonic() + pause > deadline:
                raise
            log.warning("%s: the store does not answer, next attempt in %g s: %s", name, pause, short(error))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)


def _reason(error: OSError) -> str:
    return error.strerror or short(error)
