# SPDX-License-Identifier: Apache-2.0
"""A user's own loop whose sums do not depend on the ring (training.deterministic).

A step has the blocks of trainer/step/blocks.py, and each is a turn of the loop: `step.mean()` returns None
after all but the last one of a worker, as after a step that has not happened. So a loop that obeys the rules
of `edl.join` computes each block from the same state. Seeds follow from the step and the block.

The gradients of a worker's blocks are kept until the ring knows the largest element of each gradient, from a
first small all-reduce. They are then rounded to whole numbers of a common quantum, whose sums are exact. All
other numbers travel as several each (trainer/agreement/exact_sums.py).
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from edl.data.nest import map_leaves
from edl.errors import ModelError
from edl.trainer.agreement import control
from edl.trainer.agreement.exact_sums import BLOCKS, LARGEST, words
from edl.trainer.records.batches import Batch
from edl.trainer.runtime.processor import vector_instructions
from edl.trainer.step.loop_learner import CHUNK, LoopLearner

BITS = {4: 21, 8: 50}  # of a rounded element, by the bytes of its type: BLOCKS of them have an exact sum
EXPONENTS = -100, 100
SEES_GPU: dict[str, Callable[[Any], bool]] = {
    "torch": lambda torch: torch.cuda.is_available(),
    "jax": lambda jax: jax.default_backend() != "cpu",
    "tensorflow": lambda tf: bool(tf.config.list_physical_devices("GPU")),
}


class BlockLoopLearner(LoopLearner):
    """A loop that is trained with the same bits in rings of any sizes."""

    _nth = 0  # the block that is computed, of those of this worker
    _blocks = np.zeros([0, 0], np.float32)  # their summands
    _bounds = np.zeros([0, 0], np.float32)  # the largest element of each gradient, by block

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {' '.join(vector_instructions())}"

    def _turn(self, batch: Batch | None, told: np.ndarray, step: int, rank: int) -> np.ndarray:
        first, edges = batch.block_edges(BLOCKS) if batch is not None else (rank, [0, 0])
        own = len(edges) - 1
        self._reserve(own)
        self._bounds = np.zeros([BLOCKS, len(self._gradients.leaves)], self._gradients.dtype)
        for self._nth, (begin, end) in enumerate(itertools.pairwise(edges)):
            if self._nth:
                self.turns.answer(None)
            self._seed_libraries(step, first + self._nth)
            ours = told if end == edges[-1] else np.zeros_like(told)
            vector = super()._turn(_cut(batch, begin, end), ours, step, first + self._nth)
            largest = _largest(vector, self._gradients.starts)
            if not largest.max() < LARGEST or not (np.abs(vector[self._gradients.size :]) < LARGEST).all():
                vector[~(np.abs(vector) < LARGEST)] = 0.0
                vector[-control.LENGTH + control.NONFINITE] = 1.0
                largest = _largest(vector, self._gradients.starts)
            self._bounds[first + self._nth] = largest
        told[control.NONFINITE] = self._blocks[:own, -control.LENGTH + control.NONFINITE].sum()
        return self._blocks[:own]

    def _reserve(self, blocks: int) -> None:
        if blocks > len(self._blocks) or self._blocks.shape[1] != self._length:
            self._blocks = np.empty([blocks, self._length], self._gradients.dtype)

    def _room(self) -> np.ndarray:
        self._reserve(self._nth + 1)  # without records, there was no turn
        room: np.ndarray = self._blocks[self._nth]
        return room

    def _seed_libraries(self, step: int, block: int) -> None:
        seed = int(np.random.SeedSequence([self._seed, step, block]).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(seed)

    def _summed(self, vector: np.ndarray) -> np.ndarray:
        blocks, size = np.atleast_2d(vector), self._gradients.size  # without records: one block of zeros
        total = self._memory.take(self._length, self._gradients.dtype)
        ranges = [*itertools.starmap(slice, itertools.pairwise(self._gradients.starts))]
        largest = self._bounds if vector.ndim > 1 else np.zeros([BLOCKS, len(ranges)], total.dtype)
        rest = np.sum(words(blocks[:, size:]), axis=1)
        told = self._reduce(np.concatenate([largest.reshape(-1), rest.reshape(-1)]))
        largest, rest = told[: largest.size].reshape(largest.shape), told[largest.size :].reshape(rest.shape)
        exponents = np.clip(BITS[total.itemsize] - np.frexp(largest.max(axis=0))[1], *EXPONENTS)
        quanta = np.ldexp(np.ones_like(largest[0]), -exponents)
        for part, quantum in zip(ranges, quanta, strict=True):
            _add_rounded(blocks[:, part], 1 / quantum, total[part])
        sums = self._reduce(total[:size])
        for part, quantum in zip(ranges, quanta, strict=True):
            np.multiply(sums[part], quantum, out=total[part])
        total[size:] = rest.sum(axis=0, dtype=np.float64)
        return total


def _largest(vector: np.ndarray, starts: list[int]) -> np.ndarray:
    """The largest magnitude of each gradient in a vector of summands, [gradients]; 0 without elements."""
    parts = itertools.starmap(slice, itertools.pairwise(starts))
    return np.array([max(vector[p].max(), -vector[p].min()) if p.start < p.stop else 0.0 for p in parts])


def _add_rounded(blocks: np.ndarray, scale: np.floating[Any], to: np.ndarray) -> None:
    """Write the sum of the blocks times `scale`, each number rounded to a whole one: [blocks, n] to [n]."""
    room = np.empty(min(CHUNK, len(to)), to.dtype)  # stays in the processor's cache
    for at in range(0, len(to), CHUNK):
        total = to[at : at + CHUNK]
        rounded, total[:] = room[: len(total)], 0.0
        for block in blocks:
            np.multiply(block[at : at + CHUNK], scale, out=rounded)
            total += np.rint(rounded, out=rounded)


def _cut(batch: Batch | None, begin: int, end: int) -> Batch | None:
    if batch is None:
        return None
    return Batch(batch.indices[begin:end], map_leaves(lambda a: a[begin:end], batch.x), None, None)


def settle_libraries(threads: int) -> None:
    """Let each library that the script has imported give the same bits again, or raise an error.

    Args:
        threads: of PyTorch; the environment may name another number.

    Raises:
        ModelError: one of them computes on a GPU.
    """
    for name, sees_gpu in SEES_GPU.items():
        if name in sys.modules and sees_gpu(sys.modules[name]):
            raise ModelError(f"training.deterministic must be false for this loop: {name} sees a GPU")
    if "torch" in sys.modules:
        sys.modules["torch"].use_deterministic_algorithms(True)
        sys.modules["torch"].set_num_threads(threads)
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].config.experimental.enable_op_determinism()
