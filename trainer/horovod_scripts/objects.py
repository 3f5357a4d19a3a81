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
    obj: Any, root_rank: int = 0, session: None = None, name: str | None = None, process_set: Any = None
) -> Any:
    """Return the object of `root_rank`. The other ranks' objects are not used."""
    sets = {} if process_set is None else {"process_set": process_set}
    name = name or type(obj).__name__
    data = np.frombuffer(pack(obj), np.uint8) if hvd.rank() == root_rank else np.zeros(0, np.uint8)
    size = hvd.broadcast(
        tf.constant([len(data)], tf.int64), root_rank, f"HorovodBroadcast_{name}.size", **sets
    )
    if hvd.rank() != root_rank:
        data = np.zeros(int(size[0]), np.uint8)
    sent = hvd.broadcast(tf.constant(data), root_rank, f"HorovodBroadcast_{name}.data", **sets)
    return obj if hvd.rank() == root_rank else unpack(sent.numpy().tobytes())


def allgather_object(
    obj: Any, session: None = None, name: str | None = None, process_set: Any = None
) -> list[Any]:
    """Return the objects of all ranks, in the order of the ranks."""
    sets = {} if process_set is None else {"process_set": process_set}
    name = name or type(obj).__name__
    data = np.frombuffer(pack(obj), np.uint8)
    sizes = hvd.allgather(tf.constant([len(data)], tf.int64), f"HorovodAllgather_{name}.size", **sets).numpy()
    gathered = hvd.allgather(tf.constant(data), f"HorovodAllgather_{name}.data", **sets).numpy()
    return [unpack(part.tobytes()) for part in np.split(gathered, np.cumsum(sizes)[:-1])]
