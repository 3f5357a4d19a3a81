"""The state of a member, sent to one that lacks it, while both take part in the ring.

The giver listens at an address of the ring's interface; who takes asks for it with the secret that came over
the members' authenticated streams. What is sent is how many parts there are and how long each is, the parts,
and the XXH3 of all of it. The parts are sent as they lie in memory: nothing is copied here.

A giver gives to one. Where several lack the state, that one passes on what comes, piece by piece, to the
next, and so on: the giver, for whose steps all wait, sends it once, however many there are, and the last one
has it hardly later than the first.

    number of parts, uint64 | bytes of each part, uint64 ... | parts | digest

A taker has all of it, as its digest says, or nothing. The digest is the giver's, whoever passes it on. It
finds what was damaged on its way; who gave it is known by the secret. SHA-256 was a third of what a join
takes of the processors, for whose time those who train wait.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TypeAlias

import numpy as np
import xxhash

Parts: TypeAlias = Sequence[np.ndarray]  # uint8 [bytes] each
Room: TypeAlias = Callable[[int], np.ndarray]  # makes room for a part: uint8 [bytes]

PIECE = 4 << 20  # bytes that are sent, or received, and digested at once
SILENCE_SECONDS = 60.0  # without a byte: the other side is gone
SECRET_BYTES = 32
NICE = 10
MOST_PARTS = 1 << 20


class TransferFailed(Exception):
    """The state did not come."""


class StateDamaged(Exception):
    """It came, but not as it was sent."""


class Offer:
    """A place where one who knows the secret is waited for.

    Args:
        host: to listen at, an address of this machine.
    """

    def __init__(self, host: str):
        self._secret = secrets.token_bytes(SECRET_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        port = self._listener.getsockname()[1]
        self.address = f"{host} {port} {self._secret.hex()}"  # for `take`
        self._lock = threading.Lock()
        self._came = threading.Event()  # or will not
        self._taker: socket.socket | None = None
        threading.Thread(target=self._serve, name="offer", daemon=True).start()

    def taker(self) -> socket.socket:
        """The connection to whoever came; waits for it. Its timeout is set.

        Raises:
            TransferFailed: the offer was closed before.
        """
        self._came.wait()
        if self._taker is None:
            raise TransferFailed("it was broken off")
        return self._taker

    def close(self) -> None:
        """Break off what is under way."""
        with self._lock:
            self._came.set()
            if self._taker is not None:
                _shut(self._taker)
        self._hear_no_more()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._greet, args=(connection,), name="greet", daemon=True).start()

    def _greet(self, connection: socket.socket) -> None:
        said = bytearray(SECRET_BYTES)
        try:
            connection.settimeout(SILENCE_SECONDS)
            _receive(connection, memoryview(said))
        except (OSError, TransferFailed):
            connection.close()
            return
        with self._lock:
            if self._came.is_set() or not hmac.compare_digest(said, self._secret):
                connection.close()
                return
            self._taker = connection
            self._came.set()
        self._hear_no_more()

    def _hear_no_more(self) -> None:
        _shut(self._listener)
        self._listener.close()


class Giver:
    """Gives a state to the one who knows the secret, unless it is closed before.

    Args:
        host: to listen at, an address of this machine.
        parts: of the state. They must not change.
    """

    def __init__(self, host: str, parts: Parts):
        self._parts, self._offer = parts, Offer(host)
        self.address = self._offer.address
        self._closed = False
        self._digest: Future[bytes] = Future()
        threading.Thread(target=self._make_digest, name="digest", daemon=True).start()
        threading.Thread(target=self._give, name="give", daemon=True).start()

    def close(self) -> None:
        """Break off what is under way."""
        self._closed = True
        self._offer.close()

    def _give(self) -> None:
        give_way()
        # What goes wrong the taker sees, and says so.
        with contextlib.suppress(OSError, TransferFailed), self._offer.taker() as connection:
            for piece in _pieces(self._parts):
                connection.sendall(piece)
            connection.sendall(self._digest.result())
        self._parts = ()  # it need not be kept any longer

    def _make_digest(self) -> None:
        give_way()
        digest = xxhash.xxh3_128()
        for piece in _pieces(self._parts):
            if self._closed:
                self._digest.set_exception(TransferFailed("it was broken off"))
                return
            digest.update(piece)
        self._digest.set_result(digest.digest())


def _pieces(parts: Parts) -> Iterator[memoryview]:
    """What is sent, but for the digest."""
    header = struct.pack(f"<{1 + len(parts)}Q", len(parts), *(part.nbytes for part in parts))
    for view in (memoryview(header), *(part.data for part in parts)):
        for start in range(0, len(view), PIECE):
            yield view[start : start + PIECE]


def give_way() -> None:
    """This thread gets what the others leave: nobody waits for a state that is on its way, and all wait for
    whoever is late with a step."""
    with contextlib.suppress(OSError):  # where that is not for each thread by itself
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def room(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def take(
    address: str,
    connected: Callable[[socket.socket], None] = lambda _: None,
    onward: Offer | None = None,
    room: Room = room,
) -> list[np.ndarray]:
    """The state that is given, or passed on, at `address`.

    Args:
        connected: is shown the socket, so that somebody can break it off.
        onward: what comes is passed on to who comes there, who is waited for first.
        room: for the parts.

    Raises:
        TransferFailed: it did not come.
        StateDamaged: it came, but not as it was sent.
    """
    host, port, secret = address.split()
    with contextlib.ExitStack() as until_the_end:
        further = _Further(until_the_end.enter_context(onward.taker()) if onward is not None else None)
        try:
            with socket.create_connection((host, int(port)), SILENCE_SECONDS) as connection:
                connected(connection)
                connection.sendall(bytes.fromhex(secret))
                return _take(connection, further, room)
        except OSError as error:
            raise TransferFailed(f"{host}:{port}: {error.strerror or error}") from error


class _Further:
    """To whom a state is passed on, if to anybody. Who does not take it any more sees that itself."""

    def __init__(self, connection: socket.socket | None):
        self._connection = connection

    def send(self, piece: memoryview) -> None:
        if self._connection is not None:
            try:
                self._connection.sendall(piece)
            except OSError:
                self._connection = None


def _take(connection: socket.socket, further: _Further, room_for_part: Room) -> list[np.ndarray]:
    digest = xxhash.xxh3_128()

    def block(nbytes: int, room: Room = room) -> np.ndarray:
        data = room(nbytes)
        view = data.data
        for start in range(0, nbytes, PIECE):
            piece = view[start : start + PIECE]
            _receive(connection, piece)
            further.send(piece)
            digest.update(piece)
        return data

    (count,) = struct.unpack("<Q", block(8).data)
    if count > MOST_PARTS:
        raise StateDamaged(f"a state of {count} parts was announced, expected at most {MOST_PARTS}")
    sizes = struct.unpack(f"<{count}Q", block(8 * count).data)
    parts = [block(size, room_for_part) for size in sizes]
    said = bytearray(digest.digest_size)
    _receive(connection, memoryview(said))
    further.send(memoryview(said))
    if bytes(said) != digest.digest():
        raise StateDamaged("a state was received with another digest than it was sent with")
    return parts


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if not count:
            raise TransferFailed("the connection was closed before all had come")
        view = view[count:]


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # not connected, or closed
        connection.shutdown(socket.SHUT_RDWR)
