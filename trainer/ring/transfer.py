# SPDX-License-Identifier: Apache-2.0
"""The transfer of a member's state to a member that lacks it, while both take part in the ring.

The sender listens at an address of the ring's interface. The receiver connects and proves with a secret that
it is a member: address and secret reach it over the members' authenticated streams. The parts are sent from
where they lie in memory, without a copy.

A sender sends to one receiver. If several members lack the state, each receiver forwards what it receives,
chunk by chunk, to the next one. So the first sender, on whose steps all ranks wait, sends the state only
once, and the last receiver has it hardly later than the first.

    number of parts, uint64 | bytes of each part, uint64 ... | parts | digest

A receiver gets the whole state, as the digest proves, or nothing. The digest is the first sender's, whichever
member forwards it. It finds damage on the way; the secret authenticates the peer. So a fast digest (XXH3)
suffices: SHA-256 took a third of a join's processor time, for which the training members wait.
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
Allocate: TypeAlias = Callable[[int], np.ndarray]  # allocates a part: uint8 [bytes]

CHUNK = 4 << 20  # bytes that are sent, received and digested at once
SILENCE_SECONDS = 60.0  # without a byte: the peer is lost
SECRET_BYTES = 32
NICE = 10
MAX_PARTS = 1 << 20


class TransferFailed(Exception):
    """The state was not received."""


class StateDamaged(Exception):
    """The state was received, but not as it was sent."""


class PeerListener:
    """Listens for the one peer that knows the secret.

    Args:
        host: the address of this machine to listen at.
    """

    def __init__(self, host: str):
        self._secret = secrets.token_bytes(SECRET_BYTES)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        port = self._listener.getsockname()[1]
        self.address = f"{host} {port} {self._secret.hex()}"  # the argument of `receive_state`
        self._lock = threading.Lock()
        self._decided = threading.Event()  # a peer was accepted, or the listener was closed
        self._peer: socket.socket | None = None
        threading.Thread(target=self._serve, name="listen", daemon=True).start()

    def peer(self) -> socket.socket:
        """Wait for the peer, and return the connection to it. Its timeout is set.

        Raises:
            TransferFailed: the listener was closed before.
        """
        self._decided.wait()
        if self._peer is None:
            raise TransferFailed("it was broken off")
        return self._peer

    def close(self) -> None:
        """Stop listening, and break off a transfer in progress."""
        with self._lock:
            self._decided.set()
            if self._peer is not None:
                _shut(self._peer)
        self._stop_listening()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            threading.Thread(
                target=self._authenticate, args=(connection,), name="authenticate", daemon=True
            ).start()

    def _authenticate(self, connection: socket.socket) -> None:
        secret = bytearray(SECRET_BYTES)
        try:
            connection.settimeout(SILENCE_SECONDS)
            _receive(connection, memoryview(secret))
        except (OSError, TransferFailed):
            connection.close()
            return
        with self._lock:
            if self._decided.is_set() or not hmac.compare_digest(secret, self._secret):
                connection.close()
                return
            self._peer = connection
            self._decided.set()
        self._stop_listening()

    def _stop_listening(self) -> None:
        _shut(self._listener)
        self._listener.close()


class StateSender:
    """Sends a state to the peer that knows the secret, unless it is closed before.

    Args:
        host: the address of this machine to listen at.
        parts: the parts of the state. They must not change.
    """

    def __init__(self, host: str, parts: Parts):
        self._parts, self._listener = parts, PeerListener(host)
        self.address = self._listener.address
        self._closed = False
        self._digest: Future[bytes] = Future()
        threading.Thread(target=self._make_digest, name="digest", daemon=True).start()
        threading.Thread(target=self._send, name="send", daemon=True).start()

    def close(self) -> None:
        """Break off the transfer."""
        self._closed = True
        self._listener.close()

    def _send(self) -> None:
        lower_priority()
        # The receiver notices any error, and reports it.
        with contextlib.suppress(OSError, TransferFailed), self._listener.peer() as connection:
            for chunk in _chunks(self._parts):
                connection.sendall(chunk)
            connection.sendall(self._digest.result())
        self._parts = ()  # free the memory of the snapshot

    def _make_digest(self) -> None:
        lower_priority()
        digest = xxhash.xxh3_128()
        for chunk in _chunks(self._parts):
            if self._closed:
                self._digest.set_exception(TransferFailed("it was broken off"))
                return
            digest.update(chunk)
        self._digest.set_result(digest.digest())


def _chunks(parts: Parts) -> Iterator[memoryview]:
    """The bytes that are sent, except the digest."""
    header = struct.pack(f"<{1 + len(parts)}Q", len(parts), *(part.nbytes for part in parts))
    for view in (memoryview(header), *(part.data for part in parts)):
        for start in range(0, len(view), CHUNK):
            yield view[start : start + CHUNK]


def lower_priority() -> None:
    """Lower the priority of this thread: members that train must not wait for a transfer.

    All ranks wait for the slowest rank of a step, but no rank waits for a state in transfer.
    """
    with contextlib.suppress(OSError):  # a system that has no priorities for threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def allocate(nbytes: int) -> np.ndarray:
    """Memory for a part, uint8 [nbytes]."""
    return np.empty(nbytes, np.uint8)


def receive_state(
    address: str,
    connected: Callable[[socket.socket], None] = lambda _: None,
    forward_to: PeerListener | None = None,
    allocate: Allocate = allocate,
) -> list[np.ndarray]:
    """Receive the state that is sent or forwarded at `address`.

    Args:
        connected: receives the socket, so that a different thread can break the transfer off.
        forward_to: the state is forwarded to this listener's peer, for which the call waits first.
        allocate: returns memory for a part.

    Raises:
        TransferFailed: the state was not received.
        StateDamaged: the state was received, but not as it was sent.
    """
    host, port, secret = address.split()
    with contextlib.ExitStack() as until_the_end:
        relay = Relay(until_the_end.enter_context(forward_to.peer()) if forward_to is not None else None)
        try:
            with socket.create_connection((host, int(port)), SILENCE_SECONDS) as connection:
                connected(connection)
                connection.sendall(bytes.fromhex(secret))
                return _receive_state(connection, relay, allocate)
        except OSError as error:
            raise TransferFailed(f"{host}:{port}: {error.strerror or error}") from error


class Relay:
    """The peer that a state is forwarded to, if there is one.

    If the peer breaks off, forwarding stops but receiving continues: the peer notices the end itself.
    """

    def __init__(self, connection: socket.socket | None):
        self._connection = connection

    def send(self, chunk: memoryview) -> None:
        """Forward a chunk. A receiver that fails is dropped, so that it does not fail this member."""
        if self._connection is not None:
            try:
                self._connection.sendall(chunk)
            except OSError:
                self._connection = None


def _receive_state(connection: socket.socket, relay: Relay, allocate_part: Allocate) -> list[np.ndarray]:
    digest = xxhash.xxh3_128()

    def block(nbytes: int, allocate: Allocate = allocate) -> np.ndarray:
        data = allocate(nbytes)
        view = data.data
        for start in range(0, nbytes, CHUNK):
            chunk = view[start : start + CHUNK]
            _receive(connection, chunk)
            relay.send(chunk)
            digest.update(chunk)
        return data

    (count,) = struct.unpack("<Q", block(8).data)
    if count > MAX_PARTS:
        raise StateDamaged(f"a state of {count} parts was announced, expected at most {MAX_PARTS}")
    sizes = struct.unpack(f"<{count}Q", block(8 * count).data)
    parts = [block(size, allocate_part) for size in sizes]
    expected = bytearray(digest.digest_size)
    _receive(connection, memoryview(expected))
    relay.send(memoryview(expected))
    if bytes(expected) != digest.digest():
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
