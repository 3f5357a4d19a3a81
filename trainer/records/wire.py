# SPDX-License-Identifier: Apache-2.0
"""Messages between a worker and its reader processes, over a pair of sockets.

A message is a list of packets, and a packet is one pickled value. The memory of its large arrays is not in
the pickled bytes: it lies in anonymous shared memory (memfd), whose descriptor travels with the message. So
such arrays are not copied through the socket. The memory has no name, is not limited by the size of /dev/shm,
and is freed by the kernel with the last process that uses it, however that process ends.

A packet can be forwarded without being unpacked.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

ALIGNED = 64  # bytes: TensorFlow takes such arrays without a copy
SMALL = 16384  # bytes of an array that is pickled: mapping shared memory takes longer than a copy
MAX_DESCRIPTORS = 250  # in one message of Linux
AT_ONCE = 65536  # bytes that are received by one call at least
_HEADER, _PACKET = struct.Struct("<QI"), struct.Struct("<QI?")


class Closed(Exception):
    """The other side has closed the connection, or has ended."""


class Packet:
    """One pickled value, with the memory of its arrays.

    Args:
        data: the pickled value.
        sizes: bytes of each array, in the order of the pickle.
        memory: the descriptor of the shared memory with the arrays, which this object closes; None if there
            are no arrays.
    """

    def __init__(self, data: bytes, sizes: Sequence[int] = (), memory: int | None = None):
        self.data, self.sizes, self.memory = data, sizes, memory

    def __del__(self, _close: Callable[[int], None] = os.close) -> None:
        if self.memory is not None:
            _close(self.memory)

    def unpack(self) -> Any:
        """Return the value. Its large arrays are read-only views of the shared memory."""
        if self.memory is None:
            return pickle.loads(self.data)
        view = memoryview(mmap.mmap(self.memory, _length(self.sizes), access=mmap.ACCESS_READ))
        buffers, start = [], 0
        for size in self.sizes:
            buffers.append(view[start : start + size])
            start += _aligned(size)
        return pickle.loads(self.data, buffers=buffers)


def pack(value: Any) -> Packet:
    """Pickle a value, with its large arrays in shared memory."""
    views: list[memoryview] = []

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes > SMALL:
            views.append(view)
        return view.nbytes <= SMALL

    written = io.BytesIO()
    _Pickler(written, 5, buffer_callback=is_small).dump(value)
    if not views:
        return Packet(written.getvalue())
    sizes = [view.nbytes for view in views]
    memory = os.memfd_create("edl-batch")
    packet = Packet(written.getvalue(), sizes, memory)
    os.ftruncate(memory, _length(sizes))
    start = 0
    for view, size in zip(views, sizes, strict=True):
        done = 0
        while done < size:  # writing is faster than copying into a map, which faults at each page
            done += os.pwrite(memory, view[done:], start + done)
        start += _aligned(size)
    return packet


class _Pickler(pickle.Pickler):
    """Pickles also ragged and sparse tensors, by their components."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind.__module__.startswith("tensorflow.") and kind.__name__ in ("RaggedTensor", "SparseTensor"):
            import tensorflow as tf

            spec = tf.type_spec_from_value(value)
            return _composite, (kind.__name__, spec.dtype.name, *_components(value))
        return NotImplemented


def _components(value: Any) -> tuple[Any, ...]:
    if hasattr(value, "nested_row_splits"):
        return value.flat_values, list(value.nested_row_splits)
    return value.indices, value.values, value.dense_shape


def _composite(kind: str, dtype: str, *components: Any) -> Any:
    import tensorflow as tf

    if kind == "RaggedTensor":
        return tf.RaggedTensor.from_nested_row_splits(*components, validate=False)
    return tf.SparseTensor(*components)


def _aligned(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED


def _length(sizes: Sequence[int]) -> int:
    return sum(map(_aligned, sizes))


# --- sending and receiving


def send(connection: socket.socket, packets: Sequence[Packet]) -> None:
    """Send a message.

    Raises:
        Closed: the other side has closed the connection.
        TimeoutError: it does not receive within the socket's timeout.
        ValueError: the packets have more memory descriptors than a message can carry.
    """
    descriptors = [packet.memory for packet in packets if packet.memory is not None]
    if len(descriptors) > MAX_DESCRIPTORS:
        raise ValueError(f"a message cannot have {len(descriptors)} packets with memory")
    parts = []
    for packet in packets:
        parts.append(_PACKET.pack(len(packet.data), len(packet.sizes), packet.memory is not None))
        parts.append(struct.pack(f"<{len(packet.sizes)}Q", *packet.sizes))
    parts += [packet.data for packet in packets]
    data = b"".join([_HEADER.pack(sum(map(len, parts)), len(packets)), *parts])
    try:
        sent = socket.send_fds(connection, [data], descriptors)
        connection.sendall(memoryview(data)[sent:])
    except (BrokenPipeError, ConnectionResetError) as error:
        raise Closed from error


def receive(
    connection: socket.socket, dead: int | None = None, deadline: float = float("inf")
) -> list[Packet]:
    """Receive a message. Nothing may be sent after it before it is answered.

    Args:
        dead: a descriptor that becomes readable when the other side has ended (a pidfd).
        deadline: the time (time.monotonic) until which it is waited for.

    Raises:
        Closed: the other side has closed the connection, or has ended.
        TimeoutError: the message has not come until the deadline.
    """
    descriptors: list[int] = []
    try:
        received, size = bytearray(), _HEADER.size
        while len(received) < size:
            if dead is not None or deadline != float("inf"):
                _wait(connection, dead, deadline)
            try:
                data, found, _, _ = socket.recv_fds(
                    connection, max(size - len(received), AT_ONCE), MAX_DESCRIPTORS
                )
            except ConnectionResetError as error:
                raise Closed from error
            descriptors += found
            if not data:
                raise Closed
            received += data
            if size == _HEADER.size and len(received) >= size:
                size += _HEADER.unpack_from(received)[0]
        return _packets(received, descriptors)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _packets(message: bytearray, descriptors: list[int]) -> list[Packet]:
    """The packets of a message. They take their descriptors out of the list."""
    at, heads = _HEADER.size, []
    for _ in range(_HEADER.unpack_from(message)[1]):
        length, buffers, has_memory = _PACKET.unpack_from(message, at)
        at += _PACKET.size
        heads.append((length, struct.unpack_from(f"<{buffers}Q", message, at), has_memory))
        at += 8 * buffers
    packets = []
    for length, sizes, has_memory in heads:
        memory = descriptors.pop(0) if has_memory else None
        packets.append(Packet(bytes(memoryview(message)[at : at + length]), sizes, memory))
        at += length
    return packets


def _wait(connection: socket.socket, dead: int | None, deadline: float) -> None:
    """Wait until there is something to be received.

    Raises:
        Closed: the other side has ended, and has sent nothing more.
        TimeoutError: the deadline has passed.
    """
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    if dead is not None:
        poll.register(dead, select.POLLIN)
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    ready = {fd for fd, _ in poll.poll(None if seconds == float("inf") else max(seconds * 1000, 1))}
    if connection.fileno() in ready:
        return
    if dead in ready:
        raise Closed
    raise TimeoutError
