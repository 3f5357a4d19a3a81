"""Compiled kernels for many rows at a time: find, gather, initialise, add up, update.

An index maps ids to slots by open addressing over pairs (id, slot), int64. It is one flat array with a power
of two of pairs; a slot of -1 marks a free place. Rows lie consecutively in one flat float32 array, `stride`
values each: the row itself, followed by its optimizer's slots. For each slot, `meta` holds the id, the last
step that had it, and the number of steps that had it.

Promise: the results depend only on the input numbers, and not on the order of the ids or on the other
contents of a table. No kernel holds the GIL.
"""

from __future__ import annotations

import hashlib
import math

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

# The number of ids looked up together, so that their memory accesses overlap. It is small enough that all of
# them stay in the nearest cache until they are used.
AHEAD = 128
LINE = 16  # numbers of 4 bytes in a cache line
MOST_LINES = 4  # of a row that are prefetched; the hardware prefetches the following ones
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
    for j in range(0, min(count, MOST_LINES * LINE), LINE):
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


@numba.njit(cache=True, nogil=True, inline="always")
def _quantile(p):
    """Quantile of the normal distribution: Wichura's AS 241, PPND16."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        return (
            q
            * (((((((2.5090809287301226727e3 * r + 3.3430575583588128105e4) * r + 6.7265770927008700853e4) * r
               + 4.5921953931549871457e4) * r + 1.3731693765509461125e4) * r + 1.9715909503065514427e3) * r
               + 1.3314166789178437745e2) * r + 3.3871328727963666080e0)
            / (((((((5.2264952788528545610e3 * r + 2.8729085735721942674e4) * r + 3.9307895800092710610e4) * r
               + 2.1213794301586595867e4) * r + 5.3941960214247511077e3) * r + 6.8718700749205790830e2) * r
               + 4.2313330701600911252e1) * r + 1.0)
        )  # fmt: skip
    r = math.sqrt(-math.log(p if q < 0 else 1.0 - p))
    if r <= 5.0:
        r -= 1.6
        x = (((((((7.74545014278341407640e-4 * r + 2.27238449892691845833e-2) * r
               + 2.41780725177450611770e-1) * r + 1.27045825245236838258e0) * r
               + 3.64784832476320460504e0) * r + 5.76949722146069140550e0) * r
               + 4.63033784615654529590e0) * r + 1.42343711074968357734e0) / \
            (((((((1.05075007164441684324e-9 * r + 5.47593808499534494600e-4) * r
               + 1.51986665636164571966e-2) * r + 1.48103976427480074590e-1) * r
               + 6.89767334985100004550e-1) * r + 1.67638483018380384940e0) * r
               + 2.05319162663775882187e0) * r + 1.0)  # fmt: skip
    else:
        r -= 5.0
        x = (((((((2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r
               + 1.24266094738807843860e-3) * r + 2.65321895265761230930e-2) * r
               + 2.96560571828504891230e-1) * r + 1.78482653991729133580e0) * r
               + 5.46378491116411436990e0) * r + 6.65790464350110377720e0) / \
            (((((((2.04426310338993978564e-15 * r + 1.42151175831644588870e-7) * r
               + 1.84631831751005468180e-5) * r + 7.86869131145613259100e-4) * r
               + 1.48753612908506148525e-2) * r + 1.36929880922735805310e-1) * r
               + 5.99832206555887937690e-1) * r + 1.0)  # fmt: skip
    return -x if q < 0 else x


@numba.njit(cache=True, nogil=True)
def _born(rows, at, dim, id, key, kind, a, b):
    """Write the initial row of an id.

    Args:
        key: the table's key, from its seed and its name (`table_key`).
        a, b: the value; the limits; or the mean and the standard deviation.
    """
    if kind < UNIFORM:
        value = np.float32(a)
        for j in range(dim):
            rows[at + j] = value
        return
    seed = _mix(_u(id) ^ key)
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


@numba.njit(types.void(_INDEX, _META, _ROWS, _I, _I, IDS, _I, _U, _I, _D, _D, _ROWS), cache=True, nogil=True)
def pull(index, meta, rows, stride, dim, ids, oldest, key, kind, a, b, out):
    """Write the row of each id to `out`: its stored row, or else its initial row."""
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
                _born(out, to, dim, ids[start + i], key, kind, a, b)


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


@numba.njit(
    _I(_INDEX, _META, _ROWS, _I, _I, _I, IDS, _I, _I, _I, _U, _I, _D, _D, _D, _D, _SLOTS, _ROWS, _META),
    cache=True,
    nogil=True,
)
def _place_some(
    index, meta, rows, n, stride, dim, ids, start, step, oldest, key, kind, a, b, first, second,
    slots, undo, undo_meta,
):  # fmt: skip
    """Do the work of `place` for the ids from `start` on that are looked up together."""
    mask = index.size // 2 - 1
    can_undo = undo_meta.size > 0
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
                undo_meta[META * i] = ids[i]
                undo_meta[META * i + 2] = -1
        elif can_undo:
            for j in range(META):
                undo_meta[META * i + j] = meta[META * slot + j]
            copy(undo, i * stride, rows, slot * stride, stride)
        at = META * slot
        if not known or meta[at + 1] < oldest:
            meta[at] = ids[i]
            meta[at + 2] = 0
            _born(rows, slot * stride, dim, ids[i], key, kind, a, b)
            for j in range(dim, stride):
                rows[slot * stride + j] = np.float32(first) if j < 2 * dim else np.float32(second)
        meta[at + 1] = step
        meta[at + 2] += 1
    return n


@numba.njit(
    _I(_INDEX, _META, _ROWS, _I, _I, _I, IDS, _I, _I, _U, _I, _D, _D, _D, _D, _SLOTS, _ROWS, _META),
    cache=True,
    nogil=True,
)
def place(
    index, meta, rows, n, stride, dim, ids, step, oldest, key, kind, a, b, first, second,
    slots, undo, undo_meta,
):  # fmt: skip
    """Assign a slot to each id; an id without a slot gets a new one with its initial row. Returns the number
    of slots afterwards. The arrays must have room for all of them.

    Args:
        first, second: the initial values of the optimizer's slots.
        undo, undo_meta: receive the previous contents; the id's count is -1 for a new slot. Empty arrays to
            record nothing.
    """
    for start in range(0, ids.size, AHEAD):
        n = _place_some(
            index, meta, rows, n, stride, dim, ids, start, step, oldest, key, kind, a, b, first, second,
            slots, undo, undo_meta,
        )  # fmt: skip
    return n


@numba.njit(types.void(_INDEX, _META, _ROWS, _I, _SLOTS, _ROWS, _META), cache=True, nogil=True)
def take_back(index, meta, rows, stride, slots, undo, undo_meta):
    """Undo `place` and all later changes of these rows. New slots must be the last ones."""
    mask = index.size // 2 - 1
    for i in range(slots.size):
        slot = slots[i]
        if undo_meta[META * i + 2] < 0:
            _erase(index, mask, undo_meta[META * i])
        else:
            for j in range(META):
                meta[META * slot + j] = undo_meta[META * i + j]
            for j in range(stride):
                rows[slot * stride + j] = undo[i * stride + j]


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


@numba.njit(
    _I(_INDEX, _META, _ROWS, _I, _I, _I, IDS, _I, _I, _U, _I, _D, _D, _D, _D, _SLOTS, _ROWS, _META,
       VALUES, _F, _I, _ROWS),
    cache=True,
    nogil=True,
)  # fmt: skip
def take_step(
    index, meta, rows, n, stride, dim, ids, step, oldest, key, kind, a, b, first, second,
    slots, undo, undo_meta, sums, scale, optimizer, rates,
):  # fmt: skip
    """Do `place`, and update each of these rows while it is in the cache.

    Args:
        sums: the summed gradients of each row.
        scale: the factor of these sums.
        optimizer: SGD to FTRL.
        rates: the learning rate, and the further parameters of the optimizer's update, in its order.
    """
    for start in range(0, ids.size, AHEAD):
        n = _place_some(
            index, meta, rows, n, stride, dim, ids, start, step, oldest, key, kind, a, b, first, second,
            slots, undo, undo_meta,
        )  # fmt: skip
        stop = min(start + AHEAD, ids.size)
        if optimizer == SGD:
            _sgd(rows, stride, dim, slots, start, stop, sums, scale, rates)
        elif optimizer == MOMENTUM:
            _momentum(rows, stride, dim, slots, start, stop, sums, scale, rates, False)
        elif optimizer == NESTEROV:
            _momentum(rows, stride, dim, slots, start, stop, sums, scale, rates, True)
        elif optimizer == ADAGRAD:
            _adagrad(rows, stride, dim, slots, start, stop, sums, scale, rates)
        elif optimizer == ADAM:
            _adam(rows, stride, dim, slots, start, stop, sums, scale, rates)
        else:
            _ftrl(rows, stride, dim, slots, start, stop, sums, scale, rates)
    return n


def table_key(seed: int, name: str, own_seed: int | None) -> np.uint64:
    """The key that determines the initial rows of a table, together with their ids."""
    text = f"{seed}/{'' if own_seed is None else own_seed}/{name}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little"))
