# SPDX-License-Identifier: Apache-2.0
"""Steps whose sums do not depend on the ring (training.deterministic): the same bits for any ranks.

Each step has BLOCKS blocks, which follow from its number of records. A rank has whole blocks, computes each
by itself with the same graph, and draws random numbers by the block's number. What is summed over blocks is
rounded before to multiples of one quantum. Such a sum is exact, so it has no order:

- A large gradient travels as whole numbers (int32) of a quantum 2^-e. The exponent e of each variable is a
  part of the state, and follows from the variable's last gradient. If a block's gradient is too large for it,
  the ring's sum says so, and all ranks compute the step again with a larger quantum.
- All other numbers travel as several float32 numbers each (trainer/agreement/exact_sums.py).

A common quantum could also be the maximum over all ranks. But then each rank would have to keep the gradients
of all its blocks until that is known, and would wait for one more all-reduce.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from edl.errors import DataError, ModelError
from edl.layers.embedding import Embedding
from edl.trainer.agreement import control
from edl.trainer.agreement.exact_sums import BLOCKS, LARGEST, WORDS, words
from edl.trainer.model import snapshot
from edl.trainer.model.batch_types import in_blocks
from edl.trainer.model.captured import is_generator, plain
from edl.trainer.model.model_support import is_scaled
from edl.trainer.records.batches import Batch, Following, nothing_follows
from edl.trainer.runtime.processor import vector_instructions
from edl.trainer.step.contribution import Contribution
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.overlapped import SALT, SEEDS, OverlappedStep

LIMIT = float(1 << 27)  # quanta of a block's gradient: BLOCKS of them have room in int32
AIMED = 24  # bits of the largest sum of a gradient, in quanta: a block's may be at least four times as large
FIRST = 30  # exponent of the first step
RAISED = 8  # bits by which the quantum grows when a gradient is too large
EXPONENTS = -100, 100


class BlockContribution(Contribution):
    """The contribution of one block, as numbers whose sums are exact."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        count = len(self.model.trainable_variables)
        self.exponents = tf.Variable(tf.fill([count], FIRST), trainable=False, name="exponents_of_gradients")
        # By how much they are smaller in the present attempt of a step; not a part of the state.
        self.raised = tf.Variable(tf.zeros([count], tf.int32), trainable=False, name="raised_quanta")

    @property
    def parts_size(self) -> int:
        return WORDS * self.totals

    def _parts_of(self, values: tf.Tensor) -> tf.Tensor:
        return tf.concat(words(values, tf.round), 0)

    def _totals_from(self, sums: tf.Tensor) -> tf.Tensor:
        return decoded(tf.reshape(sums, [WORDS, -1]))

    @property
    def variables(self) -> list[tf.Variable]:
        return [*super().variables, self.raised]

    def _summands(
        self,
        large: list[tf.Tensor],
        ours: tf.Tensor,
        records: tf.Tensor,
        said: tf.Tensor,
        told: tf.Tensor,
        bad: tf.Tensor,
    ) -> list[tf.Tensor]:
        assert self.layout is not None
        numbers, over = [], [tf.zeros([0])]
        for g, i in zip(large, self.layout.large, strict=True):
            quanta = g * power_of_two(self.exponents[i] - self.raised[i])
            most = tf.maximum(tf.reduce_max(quanta), -tf.reduce_min(quanta))
            over.append([tf.cast(most > LIMIT, tf.float32)])
            numbers.append(tf.cast(tf.round(quanta), tf.int32))  # anything, where the step is repeated
        values = tf.concat([ours, [told]], 0)
        bad = tf.maximum(bad, tf.cast(tf.reduce_any(tf.abs(values) >= LARGEST), tf.float32))
        rest = [*words(values, tf.round), *over, [records], said, [tf.zeros_like(bad), bad]]
        return [*numbers, tf.concat(rest, 0)]

    def read(self, rest: tf.Tensor) -> list[tf.Tensor]:
        assert self.layout is not None
        size = self.layout.rest + 1
        found, over, told = tf.split(rest, [WORDS * size, len(self.layout.large), control.LENGTH])
        values = decoded(tf.reshape(found, [WORDS, size]))
        told = tf.concat([told[: control.LOSS], values[-1:], told[control.NONFINITE :]], 0)
        return [told, values[:-1], tf.cast(over > 0, tf.int32)]

    def sums(self, more: int = control.LENGTH) -> list[tf.TensorSpec]:
        assert self.layout is not None
        *large, rest = super().sums(0)
        count = len(large)
        found = [tf.TensorSpec(spec.shape, tf.int32) for spec in large]
        if not more:
            return [*found, rest, tf.TensorSpec([count], tf.int32)]
        return [*found, tf.TensorSpec([WORDS * (self.layout.rest + 1) + count + more], tf.float32)]

    def gradients(self, sums: Sequence[tf.Tensor], raised: tf.Tensor) -> list[tf.Tensor]:
        """Return the sums of the large gradients, float32, and choose the exponents of the next step."""
        assert self.layout is not None
        exponents, found = tf.unstack(self.exponents.read_value()), []
        for nth, (i, quanta) in enumerate(zip(self.layout.large, sums, strict=True)):
            here, rounded = exponents[i] - raised[nth], tf.cast(quanta, tf.float32)
            found.append(rounded * power_of_two(-here))
            most = tf.reduce_max(tf.abs(rounded))
            bits = tf.bitwise.right_shift(tf.bitcast(most, tf.int32), 23) - 127
            exponents[i] = tf.clip_by_value(tf.where(most > 0, here + AIMED - bits, here), *EXPONENTS)
        self.exponents.assign(tf.stack(exponents))
        return found


def power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """2^exponent, exact, float32; at least 2^-126."""
    return tf.bitcast(tf.bitwise.left_shift(tf.maximum(exponent, -126) + 127, 23), tf.float32)


def decoded(sums: tf.Tensor) -> tf.Tensor:
    """The numbers whose summed words these are, [WORDS, n], rounded once: float32 [n]."""
    total = tf.cast(sums[0], tf.float64)
    for word in tf.unstack(sums)[1:]:
        total += tf.cast(word, tf.float64)
    return tf.cast(total, tf.float32)


class BlockStep(OverlappedStep):
    """A step of whole blocks, each computed by itself. The sums begin after the last one."""

    _apart = True
    _ours: BlockContribution

    def __init__(self, ours: BlockContribution, sample: Batch, divided: bool, _wire: str):
        super().__init__(ours, sample, divided, "int32")

    def trace(self, batch: Batch) -> None:
        before = _generators()
        super().trace(batch)
        if _generators() != before:
            raise ModelError(
                "training.deterministic must be false for this model: a layer, loss or metric draws from "
                "Python's or NumPy's global random numbers, so each worker would have others. Use "
                "keras.random and a keras.random.SeedGenerator"
            )

    def _turns(
        self, pieces: Sequence[list[Any]], contribution: np.ndarray, draw: np.ndarray
    ) -> Iterator[tuple[list[Any], np.ndarray, np.ndarray]]:
        for nth, (tensors, told, _) in enumerate(super()._turns(pieces, contribution, draw), int(draw[2])):
            yield tensors, told, np.array([draw[0], nth * SALT % SEEDS, nth], np.int64)

    def allreduce_step(self, *arguments: Any) -> control.StepResult:
        indices, raised = self.layout.large, np.zeros(self._ours.raised.shape, np.int32)
        while True:
            self._ours.raised.assign(raised)
            result = super().allreduce_step(*arguments)
            *given, over = result.given
            raised[indices] += RAISED * np.asarray(over)
            if result.agreed.nonfinite or not np.any(over):
                return replace(result, given=[*given, tf.constant(raised[indices])])

    def _update_graph(self, whole: tf.Tensor, *sums: tf.Tensor) -> None:
        *large, rest, raised = sums
        super()._update_graph(whole, *self._ours.gradients(large, raised), rest)


class BlockLearner(KerasLearner):
    """A model that is trained with the same bits in rings of any sizes."""

    _contribution, _stepper = BlockContribution, BlockStep
    _sums_dense = True  # rows that an optimizer takes one by one have places by rank
    _in_pieces = "training.deterministic must be false for"

    def __init__(self, model: Any, *arguments: Any, **options: Any):
        refuse(model)
        super().__init__(model, *arguments, **{**options, "pieces": BLOCKS})
        if any(is_generator(plain(v)) for v in self._step.captured):
            raise ModelError(
                "training.deterministic must be false for this model: it draws from a tf.random.Generator, "
                "which counts the draws of this worker. Use keras.random and a keras.random.SeedGenerator"
            )
        self._seeds = [v for v in model.variables if v.name == "seed_generator_state"]

    def kept(self) -> snapshot.Kept:
        # What is tried before the training draws from the model's generators, on some workers more often.
        return snapshot.Kept([*self._variables, *self._seeds])

    def fingerprint(self) -> str:
        # Kernels are chosen by the processor, and may round differently.
        return f"{super().fingerprint()} {' '.join(vector_instructions())}"

    def allreduce_step(
        self,
        batch: Batch | None,
        contribution: np.ndarray,
        step: int,
        rank: int,
        records: int,
        following: Following = nothing_follows,
    ) -> control.StepResult:
        first = in_blocks(batch, BLOCKS)[0] if batch is not None else 0
        return super().allreduce_step(batch, contribution, step, first, records, following)

    def _divided(self, batch: Batch) -> list[Batch]:
        return in_blocks(batch, BLOCKS)[1]

    def _retrace(self, batch: Batch) -> None:
        raise DataError(
            f"the batch of {batch} has other shapes than the first five records, and training.deterministic "
            "needs one graph for all batches: let feed() pad them to one length"
        )


def _generators() -> bytes:
    """The state of Python's and NumPy's global generators of random numbers."""
    return pickle.dumps((random.getstate(), np.random.get_state()))


def refuse(model: Any) -> None:
    """Refuse a model whose steps would depend on the ring.

    Raises:
        ModelError: the model cannot be trained with the same bits in every ring; the text says why.
    """
    why = (
        "TensorFlow sees a GPU; CUDA_VISIBLE_DEVICES=-1 hides it"
        if tf.config.list_physical_devices("GPU")
        else "jit_compile=True, and XLA compiles a step while it runs uncompiled; leave it out"
        if model.jit_compile
        else "run_eagerly=True; leave it out"
        if model.run_eagerly
        else "rows of an Embedding may be on servers, which apply gradients by rank; set mode=train"
        if any(isinstance(layer, Embedding) and layer.on_servers for layer in model._flatten_layers())
        else "its optimizer scales the loss (LossScaleOptimizer); use mixed_bfloat16, which needs none"
        if is_scaled(model)
        else ""
    )
    if why:
        raise ModelError(f"training.deterministic must be false for this model: {why}")
