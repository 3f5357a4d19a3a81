"""The state of a member, sent to one that lacks it, while both take part in the ring.

The giver listens at an address of the ring's interface; who takes asks for it with the secret that came over
the members' authenticated streams. What is sent is how many parts there are and how long each is, the parts,
and the SHA-256 of all of it. The parts are sent as they lie in memory: nothing is copied here.

    number of parts, uint64 | bytes of each part, uint64 ... | parts | digest

A taker has all of it, as its digest says, or nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
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

Parts: TypeAlias = Sequence[np.ndarray]  # uint8 [bytes] each

PIECE = 4 << 20  # bytes that are sent, or received, and digested at once
SILENCE_SECONDS = 60.0  # without a byte: the other side is gone
SECRET_BYTES = 32
NICE = 10
MOST_PARTS = 1 << 20


class TransferFailed(Exception):
    """The state did not come."""


class StateDamaged(Exception):
    """It came, but not as it was sent."""


class Giver:
    """Gives a state to whoever knows the secret, until it is closed.

    Args:
        host: to listen at, an address of this machine.
        parts: of the state. They must not change.
        takers: how many will come.
    """

    def __init__(self, host: str, parts: Parts, takers: int):
        self._parts, self._secret = parts, secrets.token_bytes(SECRET_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=takers)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        port = self._listener.getsockname()[1]
        self.address = f"{host} {port} {self._secret.hex()}"  # for `take`
        self._left = takers
        self._digest: Future[bytes] = Future()  # one for all takers
        threading.Thread(target=self._make_digest, name="digest", daemon=True).start()
        threading.Thread(target=self._serve, name="give", daemon=True).start()

    def close(self) -> None:
        """Break off what is under way."""
        with self._lock:
            self._closed = True
            for connection in self._connections:
                _shut(connection)
            self._parts = ()
        _shut(self._listener)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._give, args=(connection,), name="give", daemon=True).start()

    def _give(self, connection: socket.socket) -> None:
        give_way()
        with connection:
            with self._lock:
                if self._closed:
                    return
                self._connections.add(connection)
            try:
                connection.settimeout(SILENCE_SECONDS)
                said = bytearray(SECRET_BYTES)
                _receive(connection, memoryview(said))
                if hmac.compare_digest(said, self._secret):
                    self._send(connection)
                    self._given()
            except (OSError, TransferFailed):
                pass  # the taker sees it, and says so
            finally:
                with self._lock:
                    self._connections.discard(connection)

    def _given(self) -> None:
        """To one more; when all have it, it need not be kept any longer."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self._parts = ()

    def _send(self, connection: socket.socket) -> None:
        for piece in _pieces(self._parts):
            connection.sendall(piece)
        connection.sendall(self._digest.result())

    def _make_digest(self) -> None:
        give_way()
        digest = hashlib.sha256()
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


def take(address: str, connected: Callable[[socket.socket], None] = lambda _: None) -> list[np.ndarray]:
    """The state that a `Giver` gives at `address`.

    Args:
        connected: is shown the socket, so that somebody can break it off.

    Raises:
        TransferFailed: it did not come.
        StateDamaged: it came, but not as it was sent.
    """
    host, port, secret = address.split()
    try:
        with socket.create_connection((host, int(port)), SILENCE_SECONDS) as connection:
            connected(connection)
            connection.sendall(bytes.fromhex(secret))
            return _take(connection)
    except OSError as error:
        raise TransferFailed(f"{host}:{port}: {error.strerror or error}") from error


def _take(connection: socket.socket) -> list[np.ndarray]:
    digest = hashlib.sha256()

    def block(nbytes: int) -> np.ndarray:
        data = np.empty(nbytes, np.uint8)
        view = data.data
        for start in range(0, nbytes, PIECE):
            piece = view[start : start + PIECE]
            _receive(connection, piece)
            digest.update(piece)
        return data

    (count,) = struct.unpack("<Q", block(8).data)
    if count > MOST_PARTS:
        raise StateDamaged(f"a state of {count} parts was announced, expected at most {MOST_PARTS}")
    sizes = struct.unpack(f"<{count}Q", block(8 * count).data)
    parts = [block(size) for size in sizes]
    said = bytearray(digest.digest_size)
    _receive(connection, memoryview(said))
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
