# SPDX-License-Identifier: Apache-2.0
"""Click logs of a known process: SYNTHETIC, drawn from the formulas below, and not from a real log.

Promise: record i depends on (seed, ids, i) alone. Nothing is stored and any record is as near as the next
one, so a log of 10^9 records costs no more than one of a thousand; and as the process is known, so is the
best that any model can reach: `Clicks.ceiling`.

A record is an impression. Its fields (user, item, site, ...) each have a category, drawn by a power law:
the category of rank r has a share proportional to r^-exponent, so a few are in every batch and most are
seen once or never. Each category has a weight and a vector of four numbers, which are hidden. The log-odds
of a click are a bias, plus the weights of its categories, plus the products of the vectors of each two of
them (a factorization machine), plus a few numbers that depend on nothing.

The records are those of `Criteo`, with fewer columns: a model that learns from one learns from the other.

    EDL_CLICKS_RECORDS  records to train on (default 20,000); a sixth of that many are held out
    EDL_CLICKS_IDS      categories of all fields together (default 5,000)
    EDL_CLICKS_SEED     of another log (default 1)
    EDL_CRITEO          a text file of Criteo's click logs instead: the real thing
    EDL_CRITEO_TEST     the file of the records that are held out; none are without it
    EDL_CLICKS_BUCKETS  ids are hashed into so many (default 262,144); 0: they stay as they are, 64 bits wide,
                        which needs `mode: hybrid`
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

import numpy as np

import edl
from edl.errors import DataError

VECTOR = 4  # numbers of a category
NUMBERS = 4  # of a record, beside its categories
CRITEO_NUMBERS, CRITEO_FIELDS = 13, 26
COLUMNS = [
    "label",
    *(f"I{n + 1}" for n in range(CRITEO_NUMBERS)),
    *(f"C{n + 1}" for n in range(CRITEO_FIELDS)),
]
MISSING = -1  # id of a missing category
HELD_OUT = 1 << 40  # the first record of the held-out part: far behind any that is trained on
BIAS, WEIGHT, PRODUCT, NUMBER = -1.6, 0.45, 0.07, 0.25  # how large each part of the log-odds is


@dataclass(frozen=True)
class Field:
    """A column of categories.

    Args:
        size: how many there are; a share of all where it is less than 1.
        exponent: of the power law.
    """

    name: str
    size: float
    exponent: float


FIELDS = (
    Field("user", 0.60, 0.9),
    Field("item", 0.30, 1.1),
    Field("site", 0.10, 1.2),
    Field("category", 400, 1.1),
    Field("region", 100, 1.0),
    Field("hour", 24, 0.3),
    Field("weekday", 7, 0.1),
    Field("device", 5, 1.0),
)


class Clicks:
    """A reader over records [first, first + records) of such a log.

    Args:
        ids: categories of all fields together, roughly: small fields have a fixed size.
    """

    def __init__(self, records: int, ids: int = 5_000, seed: int = 1, first: int = 0):
        if records < 0:
            raise DataError(f"clicks: {records} records: expected 0 or more")
        if ids < 1000:
            raise DataError(f"clicks: {ids} ids: expected at least 1000")
        self._records, self._first, self._seed = records, first, seed
        self.sizes = tuple(int(f.size if f.size >= 1 else f.size * ids) for f in FIELDS)
        if max(self.sizes) > 1 << 32:
            raise DataError(f"clicks: {ids} ids: a field has at most 2^32")

    def __len__(self) -> int:
        return self._records

    def __str__(self) -> str:
        return (
            f"synthetic click log: {self._records:,} records of a known process (seed {self._seed}), "
            f"{sum(self.sizes):,} ids in {len(FIELDS)} fields by power laws; no real data"
        )

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """The records [start, stop): as those of `Criteo`."""
        return self.take(np.arange(start, stop))

    def take(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """The records at `indices`.

        Returns:
            clicked: float32 [n], 0 or 1.
            numbers: float32 [n, NUMBERS].
            ids: int64 [n, fields]: the field, from 0, in front of 32 bits that name the category.
        """
        ids, numbers = self._ids(indices), self._numbers(indices)
        odds = self._log_odds(ids, numbers)
        clicked = self._uniform(indices, len(FIELDS) + NUMBERS) < _sigmoid(odds)
        return {"clicked": clicked.astype(np.float32), "numbers": numbers, "ids": ids}

    def probability(self, indices: np.ndarray) -> np.ndarray:
        """The true probability of a click, float64 [n]: what the best of all models would say."""
        return _sigmoid(self._log_odds(self._ids(indices), self._numbers(indices)))

    def ceiling(self, records: int = 100_000) -> float:
        """Return the AUC of the true probabilities: its expectation over the clicks that could have happened.

        No model has a larger one except by luck.
        """
        p = np.sort(self.probability(np.arange(min(records, self._records))))
        not_clicked_below = np.concatenate([[0], np.cumsum(1 - p)[:-1]])
        pairs = p.sum() * (1 - p).sum() - (p * (1 - p)).sum()  # a record is no pair with itself
        return float((p * not_clicked_below).sum() / pairs)

    def _ids(self, indices: np.ndarray) -> np.ndarray:
        columns = []
        for number, (field, size) in enumerate(zip(FIELDS, self.sizes, strict=True)):
            rank = _power_law(self._uniform(indices, number), size, field.exponent)
            columns.append(number << 32 | _scramble(rank).astype(np.int64))
        return np.stack(columns, -1)

    def _numbers(self, indices: np.ndarray) -> np.ndarray:
        drawn = [_normal(self._bits(indices, len(FIELDS) + n)) for n in range(NUMBERS)]
        return np.stack(drawn, -1).astype(np.float32)

    def _log_odds(self, ids: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        # The hidden numbers of a category: of the id, so those of a larger log of the same seed are the same.
        key = _mixed(ids.astype(np.uint64) + np.uint64(self._seed << 8 & _WORD))
        hidden = [_normal(_mixed(key + np.uint64((n + 1) * _ODD & _WORD))) for n in range(VECTOR + 1)]
        weights, vectors = hidden[0], np.stack(hidden[1:], -1)
        # All products of two different ones: half of (the square of the sum less the sum of the squares).
        products = 0.5 * (vectors.sum(1) ** 2 - (vectors**2).sum(1)).sum(-1)
        slopes = NUMBER * np.array([1.0, -1.0] * (NUMBERS // 2))
        return BIAS + WEIGHT * weights.sum(-1) + PRODUCT * products + numbers.astype(np.float64) @ slopes

    def _bits(self, indices: np.ndarray, draw: int) -> np.ndarray:
        """Random bits of a record, uint64 [n]."""
        record = indices.astype(np.uint64) + np.uint64(self._first)
        return _mixed(_mixed(record + np.uint64(self._seed * _ODD & _WORD)) + np.uint64((draw + 1) << 40))

    def _uniform(self, indices: np.ndarray, draw: int) -> np.ndarray:
        """Float64 [n] in [0, 1)."""
        return (self._bits(indices, draw) >> np.uint64(11)) * 2.0**-53


class Criteo:
    """A reader over a text file of Criteo's click logs: tab-separated, without a header.

    A record has 13 counts and 26 categories, 32-bit hashes in hexadecimal digits; values may be missing.
    """

    def __init__(self, path: str):
        texts = [name for name in COLUMNS if name[0] == "C"]
        fill = {name: "" if name in texts else 0 for name in COLUMNS[1:]}
        self._file = edl.csv(path, COLUMNS, "\t", dict.fromkeys(texts, str), fill, header=False)

    def __len__(self) -> int:
        return len(self._file)

    def read(self, start: int, stop: int) -> dict[str, np.ndarray]:
        """The records [start, stop), as those of `Clicks`; counts are log(1 + x), as is usual."""
        columns = self._file.read(start, stop)
        numbers = np.stack([columns[name] for name in COLUMNS[1 : 1 + CRITEO_NUMBERS]], -1)
        ids = [
            [field << 32 | int(text, 16) if text else MISSING for text in columns[name]]
            for field, name in enumerate(COLUMNS[1 + CRITEO_NUMBERS :])
        ]
        return {
            "clicked": columns["label"].astype(np.float32),
            "numbers": np.log1p(np.maximum(numbers, 0)).astype(np.float32),
            "ids": np.array(ids, np.int64).T,
        }


def data(split: str) -> edl.Reader | None:
    """What the models of the zoo learn from: `data(split)` of each of them."""
    if split not in ("train", "validation"):
        return None
    if path := os.environ.get("EDL_CRITEO"):
        held_out = os.environ.get("EDL_CRITEO_TEST")
        file = path if split == "train" else held_out
        return Criteo(file) if file else None
    records, ids, seed = _number("RECORDS", 20_000), _number("IDS", 5_000), _number("SEED", 1)
    if split == "validation":
        return Clicks(records // 6, ids, seed, HELD_OUT)
    log = Clicks(records, ids, seed)
    print(f"{log}; the best possible AUC is {log.ceiling(20_000):.3f}", file=sys.stderr)
    return log


def widths() -> tuple[int, int]:
    """How many numbers and ids a record has."""
    if os.environ.get("EDL_CRITEO"):
        return CRITEO_NUMBERS, CRITEO_FIELDS
    return NUMBERS, len(FIELDS)


def buckets() -> int | None:
    """The `input_dim` of embedding layers: into how many ids are hashed; None: they are not."""
    return _number("BUCKETS", 1 << 18) or None


def hashed(ids: np.ndarray) -> np.ndarray:
    """The ids that a model is given: none is missing, and all are below `buckets()` if there are."""
    fields = np.arange(ids.shape[-1])
    known = np.where(ids == MISSING, (fields + len(fields)) << 32, ids)
    most = buckets()
    return (_mixed(known.astype(np.uint64)) % np.uint64(most)).astype(np.int64) if most else known


def crossed(ids: np.ndarray, first: int, second: int) -> np.ndarray:
    """Ids of the pairs of two fields' categories, int64 [n, 1], from records' ids as they were read."""
    pair = _mixed(ids[:, first].astype(np.uint64)) + np.uint64(3) * _mixed(ids[:, second].astype(np.uint64))
    wide = (_mixed(pair) >> np.uint64(2)) | np.uint64(1 << 62)  # apart from the ids of categories
    most = buckets()
    return (wide % np.uint64(most) if most else wide).astype(np.int64)[:, None]


def _number(name: str, default: int) -> int:
    text = os.environ.get(f"EDL_CLICKS_{name}", "")
    try:
        return int(text or default)
    except ValueError:
        raise DataError(f"EDL_CLICKS_{name}: expected a whole number, and is {text!r}") from None


def _power_law(uniform: np.ndarray, size: int, exponent: float) -> np.ndarray:
    """Ranks in [0, size), uint64 [n]: rank r - 1 about as often as r^-exponent says."""
    if exponent == 1:
        ranks = (size + 1.0) ** uniform
    else:
        power = 1 - exponent
        ranks = (1 + uniform * ((size + 1.0) ** power - 1)) ** (1 / power)
    return np.minimum(ranks.astype(np.uint64) - np.uint64(1), np.uint64(size - 1))


def _scramble(ranks: np.ndarray) -> np.ndarray:
    """The same numbers spread over 32 bits, no two in one place (MurmurHash3's last step)."""
    x = ranks.astype(np.uint32)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x *= np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output function, uint64."""
    x = x + np.uint64(_ODD)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _normal(bits: np.ndarray) -> np.ndarray:
    """Numbers of mean 0 and variance 1, near enough normal: four uniform ones of 16 bits, added up."""
    parts = [(bits >> np.uint64(16 * n)) & np.uint64(0xFFFF) for n in range(4)]
    return (np.sum(parts, 0) / 65536 - 2) * 3**0.5


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


_ODD, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
