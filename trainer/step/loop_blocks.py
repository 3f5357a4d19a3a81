# SPDX-License-Identifier: Apache-2.0
"""A user's own loop whose sums do not depend on the ring (training.deterministic).

A step has the blocks of trainer/step/blocks.py, and each is a turn of the loop: `step.mean()` returns None
after all but the last one of a worker, as after a step that has not happened. So a loop that obeys the rules
of `edl.join` computes each block from the same state. Seeds follow from the step and the block. All that a
step sums travels as several numbers, whose sums are exact (trainer/agreement/exact_sums.py).
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
from edl.trainer.agreement.exact_sums import BLOCKS, LARGEST, WORDS, words
from edl.trainer.records.batches import Batch
from edl.trainer.runtime.processor import vector_instructions
from edl.trainer.step.loop_learner import LoopLearner

SEES_GPU: dict[str, Callable[[Any], bool]] = {
    "torch": lambda torch: torch.cuda.is_available(),
    "jax": lambda jax: jax.default_backend() != "cpu",
    "tensorflow": lambda tf: bool(tf.config.list_physical_devices("GPU")),
}


class BlockLoopLearner(LoopLearner):
    """A loop that is trained with the same bits in rings of any sizes."""

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {' '.join(vector_instructions())}"

    def _turn(self, batch: Batch | None, told: np.ndarray, step: int, rank: int) -> np.ndarray:
        first, edges = batch.block_edges(BLOCKS) if batch is not None else (rank, [0, 0])
        total = np.zeros([WORDS, self._length], self._gradients.dtype)
        for nth, (begin, end) in enumerate(itertools.pairwise(edges)):
            if nth:
                self.turns.answer(None)
            self._seed_libraries(step, first + nth)
            ours = told if end == edges[-1] else np.zeros_like(told)
            vector = super()._turn(_cut(batch, begin, end), ours, step, first + nth)
            if (large := ~(np.abs(vector) < LARGEST)).any():
                vector[large], vector[-control.LENGTH + control.NONFINITE] = 0.0, 1.0
            total += words(vector)
        told[control.NONFINITE] = total[:, -control.LENGTH + control.NONFINITE].sum()
        return total.reshape(-1)

    def _seed_libraries(self, step: int, block: int) -> None:
        seed = int(np.random.SeedSequence([self._seed, step, block]).generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(seed)

    def _summed(self, vector: np.ndarray) -> np.ndarray:
        summands = np.concatenate(words(vector)) if len(vector) == self._length else vector
        total = self._memory.take(self._length, self._gradients.dtype)
        total[:] = self._reduce(summands).reshape(WORDS, -1).sum(axis=0, dtype=np.float64)
        return total


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
