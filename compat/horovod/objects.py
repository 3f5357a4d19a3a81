# SPDX-License-Identifier: Apache-2.0
"""hvd.broadcast_object and hvd.allgather_object.

None, booleans, numbers, strings and bytes, and lists, tuples, dictionaries and sets of them, travel as Python
literals, and receiving them runs no code. Any other object is pickled, as Horovod does with all. Unpickling
runs code that the sender chooses. The ring has no authentication of its own, so do not let strangers into
its network.
"""

from __future__ import annotations

import ast
import math
import pickle
from typing import Any

import cloudpickle
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

LITERAL, PICKLE = b"L", b"P"
_ATOMS = (type(None), bool, int, float, str, bytes)


def pack(value: Any) -> bytes:
    """Serialize a value: as a literal if it is one, else by pickle."""
    if _is_literal(value):
        return LITERAL + repr(value).encode()
    return PICKLE + bytes(cloudpickle.dumps(value))


def unpack(data: bytes) -> Any:
    """Return the value that `pack` has serialized.

    Raises:
        ValueError: the data are neither a literal nor a pickle.
    """
    kind, content = data[:1], data[1:]
    if kind == LITERAL:
        return ast.literal_eval(content.decode())
    if kind != PICKLE:
        raise ValueError(f"a received object begins with {kind!r}: expected {LITERAL!r} or {PICKLE!r}")
    return pickle.loads(content)


def _is_literal(value: Any) -> bool:
    # Subclasses may print as something else, and an infinite float prints as a name.
    if type(value) in (list, tuple) or (type(value) is set and value):
        return all(map(_is_literal, value))
    if type(value) is dict:
        return all(_is_literal(key) and _is_literal(held) for key, held in value.items())
    return type(value) in _ATOMS and not (type(value) is float and not math.isfinite(value))


def broadcast_object(
    obj: Any, root_rank: int = 0, session: Any = None, name: str | None = None, process_set: Any = None
) -> Any:
    """Return the object of `root_rank`. The other ranks' objects are not used."""
    sets = {} if process_set is None else {"process_set": process_set}
    name = name or type(obj).__name__
    data = np.frombuffer(pack(obj), np.uint8) if hvd.rank() == root_rank else np.zeros(0, np.uint8)
    length = tf.constant([len(data)], tf.int64)
    size = _value(hvd.broadcast(length, root_rank, f"HorovodBroadcast_{name}.size", **sets), session)
    if hvd.rank() != root_rank:
        data = np.zeros(int(size[0]), np.uint8)
    sent = hvd.broadcast(tf.constant(data), root_rank, f"HorovodBroadcast_{name}.data", **sets)
    received = _value(sent, session)
    return obj if hvd.rank() == root_rank else unpack(received.tobytes())


def allgather_object(
    obj: Any, session: Any = None, name: str | None = None, process_set: Any = None
) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks."""
    sets = {} if process_set is None else {"process_set": process_set}
    name = name or type(obj).__name__
    data = np.frombuffer(pack(obj), np.uint8)
    length = tf.constant([len(data)], tf.int64)
    sizes = _value(hvd.allgather(length, f"HorovodAllgather_{name}.size", **sets), session)
    gathered = _value(hvd.allgather(tf.constant(data), f"HorovodAllgather_{name}.data", **sets), session)
    return [unpack(part.tobytes()) for part in np.split(gathered, np.cumsum(sizes)[:-1])]


def _value(tensor: tf.Tensor, session: Any) -> np.ndarray:
    """Compute a tensor: in a graph of TensorFlow 1 by this session or the default one."""
    if tf.executing_eagerly():
        return tensor.numpy()
    return (session or tf.compat.v1.get_default_session()).run(tensor)
