# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels for many rows at a time: find, gather, initialise, add up, update.

An index maps ids to slots by open addressing over pairs (id, slot), int64. It is one flat array with a power
of two of pairs; a slot of -1 marks a free place. Rows lie consecutively in one flat float32 array, `stride`
values each: the row itself, followed by its optimizer's slots. For each slot, `meta` holds the id, the last
step that had it, and the number of steps that had it.

Promise: the results depend only on the input numbers, and not on the order of the ids or on the other
contents of a table. No kernel holds the GIL.

All kernels are in one file, though it is long: numba keeps compiled code in a cache, and compiles a function
again only if the function's own file has changed. A kernel that calls a function of a different file would
run with the old code of that function.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

import numpy as np

from edl.ps.table.numba_support import IDS, VALUES, copy, numba, prefetch, types

ZEROS, ONES, CONSTANT, UNIFORM, NORMAL, TRUNCATED = range(6)  # kinds of initial rows
META = 3  # numbers for each slot: id, last step, count


_u = np.uint64
_INDEX = types.int64[::1]
_META = types.int64[::1]
_ROWS = types.float32[::1]
_SLOTS = types.int64[::1]
_F, _D, _I, _U = types.float32, types.float64, types.int64, types.uint64


class Arrays(NamedTuple):
    """The memory of a table."""

    pairs: np.ndarray  # int64: the index
    meta: np.ndarray  # int64
    rows: np.ndarray  # float32
    stride: int
    dim: int


class NewRow(NamedTuple):
    """How a new row begins."""

    key: np.uint64  # the table's key (`table_key`)
    kind: int  # ZEROS to TRUNCATED
    a: float  # the value; the lower limit; or the mean
    b: float  # the upper limit; or the standard deviation
    first: float  # the initial values of the optimizer's two slots
    second: float


class Undo(NamedTuple):
    """Receives the previous contents of rows, with count -1 for a new slot. Empty: record nothing."""

    rows: np.ndarray  # float32 [ids * stride]
    meta: np.ndarray  # int64 [ids * META]


class Update(NamedTuple):
    """An update of an optimizer."""

    kind: int  # SGD to FTRL
    scale: np.float32  # factor of the gradients
    rates: np.ndarray  # float32: the learning rate, and the further parameters of the update, in its order


_ARRAYS = types.NamedTuple([_INDEX, _META, _ROWS, _I, _I], Arrays)
_NEW_ROW = types.NamedTuple([_U, _I, _D, _D, _D, _D], NewRow)
_UNDO = types.NamedTuple([_ROWS, _META], Undo)
_OPTIMIZER = types.NamedTuple([_I, _F, _ROWS], Update)

# The number of ids looked up together, so that their memory accesses overlap. It is small enough that all of
# them stay in the nearest cache until they are used.
AHEAD = 128
LINE = 16  # numbers of 4 bytes in a cache line
MAX_LINES = 4  # of a row that are prefetched; the hardware prefetches the following ones
NEAR = 12  # rows that are prefetched while one is updated


@numba.njit(cache=True, nogil=True, inline="always")
def _mix(x):
    """SplitMix64's output function."""
    x ^= x >> _u(30)
    x *= _u(0xBF58476D1CE4E5B9)
    x ^= x >> _u(27)
    x *= _u(0x94D049BB133111EB)
    return x ^ (x >> _u(31))


@numba.njit(cache=True, nogil=True, inline="always")
def _find(index, mask, id):
    at = np.int64(_mix(_u(id)) & _u(mask))
    while True:
        slot = index[2 * at + 1]
        if slot < 0 or index[2 * at] == id:
            return slot
        at = (at + 1) & mask


@numba.njit(cache=True, nogil=True, inline="always")
def _fetch(rows, at, count):
    """Prefetch `count` numbers of an array."""
    for j in range(0, min(count, MAX_LINES * LINE), LINE):
        prefetch(rows, at + j)
    prefetch(rows, at + count - 1)


@numba.njit(cache=True, nogil=True, inline="always")
def _find_some(index, mask, ids, start, size, slots, to, rows, stride, count):
    """Find the slots of some ids, from `start` on, and prefetch `count` numbers of their rows."""
    for i in range(start, start + size):
        prefetch(index, 2 * np.int64(_mix(_u(ids[i])) & _u(mask)))
    for i in range(size):
        slot = _find(index, mask, ids[start + i])
        slots[to + i] = slot
        if slot >= 0:
            _fetch(rows, slot * stride, count)


@numba.njit(cache=True, nogil=True, inline="always")
def _insert(index, mask, id, slot):
    at = np.int64(_mix(_u(id)) & _u(mask))
    while index[2 * at + 1] >= 0 and index[2 * at] != id:
        at = (at + 1) & mask
    index[2 * at] = id
    index[2 * at + 1] = slot


@numba.njit(cache=True, nogil=True, inline="always")
def _erase(index, mask, id):
    """Remove an id, and move forward the following ids that could not be found otherwise."""
    at = np.int64(_mix(_u(id)) & _u(mask))
    while index[2 * at + 1] >= 0 and index[2 * at] != id:
        at = (at + 1) & mask
    if index[2 * at + 1] < 0:
        return
    free = at
    while True:
        at = (at + 1) & mask
        if index[2 * at + 1] < 0:
            break
        home = np.int64(_mix(_u(index[2 * at])) & _u(mask))
        if ((at - home) & mask) >= ((at - free) & mask):
            index[2 * free] = index[2 * at]
            index[2 * free + 1] = index[2 * at + 1]
            free = at
    index[2 * free + 1] = -1


# Coefficients of Wichura's AS 241, PPND16, from the highest power down: numerator and denominator.
_CENTER = (
    2.5090809287301226727e3,
    3.3430575583588128105e4,
    6.7265770927008700853e4,
    4.5921953931549871457e4,
    1.3731693765509461125e4,
    1.9715909503065514427e3,
    1.3314166789178437745e2,
    3.3871328727963666080e0,
)
_CENTER_BELOW = (
    5.2264952788528545610e3,
    2.8729085735721942674e4,
    3.9307895800092710610e4,
    2.1213794301586595867e4,
    5.3941960214247511077e3,
    6.8718700749205790830e2,
    4.2313330701600911252e1,
    1.0,
)
_TAIL = (
    7.74545014278341407640e-4,
    2.27238449892691845833e-2,
    2.41780725177450611770e-1,
    1.27045825245236838258e0,
    3.64784832476320460504e0,
    5.76949722146069140550e0,
    4.63033784615654529590e0,
    1.42343711074968357734e0,
)
_TAIL_BELOW = (
    1.05075007164441684324e-9,
    5.47593808499534494600e-4,
    1.51986665636164571966e-2,
    1.48103976427480074590e-1,
    6.89767334985100004550e-1,
    1.67638483018380384940e0,
    2.05319162663775882187e0,
    1.0,
)
_FAR = (
    2.01033439929228813265e-7,
    2.71155556874348757815e-5,
    1.24266094738807843860e-3,
    2.65321895265761230930e-2,
    2.96560571828504891230e-1,
    1.78482653991729133580e0,
    5.46378491116411436990e0,
    6.65790464350110377720e0,
)
_FAR_BELOW = (
    2.04426310338993978564e-15,
    1.42151175831644588870e-7,
    1.84631831751005468180e-5,
    7.86869131145613259100e-4,
    1.48753612908506148525e-2,
    1.36929880922735805310e-1,
    5.99832206555887937690e-1,
    1.0,
)


@numba.njit(cache=True, nogil=True, inline="always")
def _polynomial(coefficients, r):
    """Horner's scheme."""
    x = coefficients[0]
    for i in range(1, len(coefficients)):
        x = x * r + coefficients[i]
    return x


@numba.njit(cache=True, nogil=True, inline="always")
def _quantile(p):
    """Quantile of the normal distribution: Wichura's AS 241, PPND16."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return q * _polynomial(_CENTER, r) / _polynomial(_CENTER_BELOW, r)
    r = math.sqrt(-math.log(p if q < 0 else 1.0 - p))
    if r <= 5.0:
        r -= 1.6
        x = _polynomial(_TAIL, r) / _polynomial(_TAIL_BELOW, r)
    else:
        r -= 5.0
        x = _polynomial(_FAR, r) / _polynomial(_FAR_BELOW, r)
    return -x if q < 0 else x


@numba.njit(cache=True, nogil=True)
def _born(rows, at, dim, id, new):
    """Write the initial row of an id."""
    kind, a, b = new.kind, new.a, new.b
    if kind < UNIFORM:
        value = np.float32(a)
        for j in range(dim):
            rows[at + j] = value
        return
    seed = _mix(_u(id) ^ new.key)
    for j in range(dim):
        bits = _mix(seed + _u(j + 1) * _u(0x9E3779B97F4A7C15))
        # In the middle of one of 2^52 equal pieces of the unit interval: never 0, never 1.
        p = (np.float64(bits >> _u(12)) + 0.5) * (1.0 / 4503599627370496.0)
        if kind == UNIFORM:
            rows[at + j] = np.float32(a + (b - a) * p)
        elif kind == NORMAL:
            rows[at + j] = np.float32(a + b * _quantile(p))
        else:  # within two standard deviations: a share of 0.02275... lies beyond them on either side
            p = 0.022750131948179209 + p * 0.95449973610364158
            rows[at + j] = np.float32(a + b * _quantile(p))


@numba.njit(types.void(_ARRAYS, IDS, _I, _NEW_ROW, _ROWS), cache=True, nogil=True)
def pull(table, ids, oldest, new, out):
    """Write the row of each id to `out`: its stored row, or else its initial row."""
    index, meta, rows, stride, dim = table
    mask = index.size // 2 - 1
    n = ids.size
    slots = np.empty(AHEAD, np.int64)
    for start in range(0, n, AHEAD):
        size = min(AHEAD, n - start)
        _find_some(index, mask, ids, start, size, slots, 0, rows, stride, dim)
        for i in range(size):
            slot = slots[i]
            to = (start + i) * dim
            # If rows are never forgotten, `meta` is not read, because it lies elsewhere in memory.
            if slot >= 0 and (oldest < 0 or meta[META * slot + 1] >= oldest):
                copy(out, to, rows, slot * stride, dim)
            else:
                _born(out, to, dim, ids[start + i], new)


@numba.njit(types.void(_INDEX, _META, IDS, _I, _SLOTS), cache=True, nogil=True)
def find(index, meta, ids, oldest, slots):
    """Find the slot of each id; -1 for an id without a slot, or whose row is older than `oldest`."""
    mask = index.size // 2 - 1
    for start in range(0, ids.size, AHEAD):
        _find_some(index, mask, ids, start, min(AHEAD, ids.size - start), slots, start, meta, META, META)
    if oldest > 0:
        for i in range(ids.size):
            if slots[i] >= 0 and meta[META * slots[i] + 1] < oldest:
                slots[i] = -1


@numba.njit(types.void(_INDEX, _META, _I, _I), cache=True, nogil=True)
def index_more(index, meta, start, stop):
    """Insert the ids of these slots."""
    mask = index.size // 2 - 1
    for slot in range(start, stop):
        _insert(index, mask, meta[META * slot], slot)


@numba.njit(types.boolean(IDS, types.int32[::1]), cache=True, nogil=True)
def distinct(ids, scratch):
    """Whether the ids are distinct.

    Args:
        scratch: as in `add_up`.
    """
    mask = scratch.size - 1
    for i in range(ids.size):
        if i + NEAR < ids.size:
            prefetch(scratch, np.int64(_mix(_u(ids[i + NEAR])) & _u(mask)))
        at = np.int64(_mix(_u(ids[i])) & _u(mask))
        while scratch[at] >= 0:
            if ids[scratch[at]] == ids[i]:
                return False
            at = (at + 1) & mask
        scratch[at] = i
    return True


@numba.njit(_I(_SLOTS, _I, _ROWS, IDS, VALUES, _I, types.int32[::1]), cache=True, nogil=True)
def add_up(union, n, sums, ids, values, dim, scratch):
    """Add one rank's gradients to the sums so far; returns the number of ids that have gradients now.

    Args:
        union: the ids, in the order of their first occurrence.
        scratch: an index of `union`: -1, or a position in it.
    """
    mask = scratch.size - 1
    for i in range(ids.size):
        if i + NEAR < ids.size:
            prefetch(scratch, np.int64(_mix(_u(ids[i + NEAR])) & _u(mask)))
        id = ids[i]
        at = np.int64(_mix(_u(id)) & _u(mask))
        while scratch[at] >= 0 and union[scratch[at]] != id:
            at = (at + 1) & mask
        u = np.int64(scratch[at])
        if u < 0:
            scratch[at] = n
            union[n] = id
            copy(sums, n * dim, values, i * dim, dim)
            n += 1
        else:
            for j in range(dim):
                sums[u * dim + j] += values[i * dim + j]
    return n


@numba.njit(_I(_ARRAYS, _I, IDS, _I, _I, _I, _NEW_ROW, _SLOTS, _UNDO), cache=True, nogil=True)
def _place_some(table, n, ids, start, step, oldest, new, slots, undo):
    """Do the work of `place` for the ids from `start` on that are looked up together."""
    index, meta, rows, stride, dim = table
    mask = index.size // 2 - 1
    can_undo = undo.meta.size > 0
    stop = min(start + AHEAD, ids.size)
    _find_some(index, mask, ids, start, stop - start, slots, start, rows, stride, stride)
    for i in range(start, stop):
        if slots[i] >= 0:
            prefetch(meta, META * slots[i])
    for i in range(start, stop):
        slot = slots[i]
        known = slot >= 0
        if not known:
            slot = n
            n += 1
            slots[i] = slot
            _insert(index, mask, ids[i], slot)
            if can_undo:
                undo.meta[META * i] = ids[i]
                undo.meta[META * i + 2] = -1
        elif can_undo:
            for j in range(META):
                undo.meta[META * i + j] = meta[META * slot + j]
            copy(undo.rows, i * stride, rows, slot * stride, stride)
        at = META * slot
        if not known or meta[at + 1] < oldest:
            meta[at] = ids[i]
            meta[at + 2] = 0
            _born(rows, slot * stride, dim, ids[i], new)
            for j in range(dim, stride):
                rows[slot * stride + j] = np.float32(new.first) if j < 2 * dim else np.float32(new.second)
        meta[at + 1] = step
        meta[at + 2] += 1
    return n


@numba.njit(_I(_ARRAYS, _I, IDS, _I, _I, _NEW_ROW, _SLOTS, _UNDO), cache=True, nogil=True)
def place(table, n, ids, step, oldest, new, slots, undo):
    """Assign a slot to each id; an id without a slot gets a new one with its initial row.

    The arrays must have room for all of them.

    Returns:
        the number of slots afterwards; there were `n`.
    """
    for start in range(0, ids.size, AHEAD):
        n = _place_some(table, n, ids, start, step, oldest, new, slots, undo)
    return n


@numba.njit(types.void(_ARRAYS, _SLOTS, _UNDO), cache=True, nogil=True)
def take_back(table, slots, undo):
    """Undo `place` and all later changes of these rows. New slots must be the last ones."""
    index, meta, rows, stride, _ = table
    mask = index.size // 2 - 1
    for i in range(slots.size):
        slot = slots[i]
        if undo.meta[META * i + 2] < 0:
            _erase(index, mask, undo.meta[META * i])
        else:
            for j in range(META):
                meta[META * slot + j] = undo.meta[META * i + j]
            for j in range(stride):
                rows[slot * stride + j] = undo.rows[i * stride + j]


@numba.njit(_I(_INDEX, _META, _ROWS, _I, _I, _I), cache=True, nogil=True)
def drop_older(index, meta, rows, n, stride, oldest):
    """Remove the rows that no step from `oldest` on has had; returns the number of remaining rows."""
    mask = index.size // 2 - 1
    slot = 0
    while slot < n:
        if meta[META * slot + 1] >= oldest:
            slot += 1
            continue
        _erase(index, mask, meta[META * slot])
        n -= 1
        if slot < n:
            for j in range(META):
                meta[META * slot + j] = meta[META * n + j]
            for j in range(stride):
                rows[slot * stride + j] = rows[n * stride + j]
            _insert(index, mask, meta[META * slot], slot)
    return n


@numba.njit(types.void(_INDEX, _META, _I, IDS), cache=True, nogil=True)
def drop(index, meta, n, ids):
    """Remove some of `n` entries that have no rows. All of these ids must be present."""
    mask = index.size // 2 - 1
    for i in range(ids.size):
        slot = _find(index, mask, ids[i])
        _erase(index, mask, ids[i])
        n -= 1
        if slot != n:
            for j in range(META):
                meta[META * slot + j] = meta[META * n + j]
            _insert(index, mask, meta[META * slot], slot)


# --- optimizers: one update of each of these rows. `g` is the gradient, float32 throughout as in Keras.

SGD, MOMENTUM, NESTEROV, ADAGRAD, ADAM, FTRL = range(6)

_UPDATE = types.void(_ROWS, _I, _I, _SLOTS, _I, _I, VALUES, _F, _ROWS)


@numba.njit(_UPDATE, cache=True, nogil=True)
def _sgd(rows, stride, dim, slots, start, stop, sums, scale, rates):
    lr = rates[0]
    for i in range(start, stop):
        if i + NEAR < stop:
            _fetch(rows, slots[i + NEAR] * stride, stride)
        w = slots[i] * stride
        for j in range(dim):
            g = sums[i * dim + j] * scale
            rows[w + j] -= g * lr


@numba.njit(
    types.void(_ROWS, _I, _I, _SLOTS, _I, _I, VALUES, _F, _ROWS, types.boolean), cache=True, nogil=True
)
def _momentum(rows, stride, dim, slots, start, stop, sums, scale, rates, nesterov):
    lr, decay = rates[0], rates[1]
    for i in range(start, stop):
        if i + NEAR < stop:
            _fetch(rows, slots[i + NEAR] * stride, stride)
        w = slots[i] * stride
        for j in range(dim):
            g = sums[i * dim + j] * scale
            m = rows[w + dim + j] * decay - g * lr
            rows[w + dim + j] = m
            rows[w + j] += m * decay - g * lr if nesterov else m


@numba.njit(_UPDATE, cache=True, nogil=True)
def _adagrad(rows, stride, dim, slots, start, stop, sums, scale, rates):
    lr, epsilon = rates[0], rates[1]
    for i in range(start, stop):
        if i + NEAR < stop:
            _fetch(rows, slots[i + NEAR] * stride, stride)
        w = slots[i] * stride
        for j in range(dim):
            g = sums[i * dim + j] * scale
            squares = rows[w + dim + j] + g * g
            rows[w + dim + j] = squares
            rows[w + j] -= lr * g / np.sqrt(squares + epsilon)


@numba.njit(_UPDATE, cache=True, nogil=True)
def _adam(rows, stride, dim, slots, start, stop, sums, scale, rates):
    alpha, rest_1, rest_2, epsilon = rates[0], rates[1], rates[2], rates[3]
    for i in range(start, stop):
        if i + NEAR < stop:
            _fetch(rows, slots[i + NEAR] * stride, stride)
        w = slots[i] * stride
        for j in range(dim):
            g = sums[i * dim + j] * scale
            m = rows[w + dim + j]
            v = rows[w + 2 * dim + j]
            m += (g - m) * rest_1
            v += (g * g - v) * rest_2
            rows[w + dim + j] = m
            rows[w + 2 * dim + j] = v
            rows[w + j] -= m * alpha / (np.sqrt(v) + epsilon)


@numba.njit(_UPDATE, cache=True, nogil=True)
def _ftrl(rows, stride, dim, slots, start, stop, sums, scale, rates):
    lr, power, l1, l2, shrinkage = rates[0], rates[1], rates[2], rates[3], rates[4]
    half = np.float32(0.5)
    for i in range(start, stop):
        if i + NEAR < stop:
            _fetch(rows, slots[i + NEAR] * stride, stride)
        w = slots[i] * stride
        for j in range(dim):
            g = sums[i * dim + j] * scale
            weight = rows[w + j]
            before = rows[w + dim + j]
            linear = rows[w + 2 * dim + j]
            after = before + g * g
            if power == half:
                root, old = np.sqrt(after), np.sqrt(before)
            else:
                root, old = after**power, before**power
            linear += g + shrinkage * weight - (root - old) / lr * weight
            clipped = min(max(linear, -l1), l1)
            rows[w + j] = (clipped - linear) / (root / lr + np.float32(2.0) * l2)
            rows[w + dim + j] = after
            rows[w + 2 * dim + j] = linear


@numba.njit(_I(_ARRAYS, _I, IDS, _I, _I, _NEW_ROW, _SLOTS, _UNDO, VALUES, _OPTIMIZER), cache=True, nogil=True)
def take_step(table, n, ids, step, oldest, new, slots, undo, sums, update):
    """Do `place`, and update each of these rows while it is in the cache.

    Args:
        sums: the summed gradients of each row.
    """
    rows, stride, dim = table.rows, table.stride, table.dim
    kind, scale, rates = update
    for start in range(0, ids.size, AHEAD):
        n = _place_some(table, n, ids, start, step, oldest, new, slots, undo)
        stop = min(start + AHEAD, ids.size)
        if kind == SGD:
            _sgd(rows, stride, dim, slots, start, stop, sums, scale, rates)
        elif kind == MOMENTUM:
            _momentum(rows, stride, dim, slots, start, stop, sums, scale, rates, False)
        elif kind == NESTEROV:
            _momentum(rows, stride, dim, slots, start, stop, sums, scale, rates, True)
        elif kind == ADAGRAD:
            _adagrad(rows, stride, dim, slots, start, stop, sums, scale, rates)
        elif kind == ADAM:
            _adam(rows, stride, dim, slots, start, stop, sums, scale, rates)
        else:
            _ftrl(rows, stride, dim, slots, start, stop, sums, scale, rates)
    return n


def table_key(seed: int, name: str, own_seed: int | None) -> np.uint64:
    """The key that determines the initial rows of a table, together with their ids."""
    text = f"{seed}/{'' if own_seed is None else own_seed}/{name}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))
