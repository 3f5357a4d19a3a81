# SPDX-License-Identifier: Apache-2.0
"""Steps whose sums do not depend on the ring (training.deterministic): the same bits for any ranks.

Each step has BLOCKS blocks, which follow from its number of records. A rank has whole blocks, computes each
by itself with the same graph, and draws random numbers by the block's number. What is summed over blocks is
rounded before to multiples of one quantum. Such a sum is exact, so it has no order:

- A large gradient travels as whole numbers (int32) of a quantum 2^-e. To round it, a constant is added that
  is so large that the float32 of the sum has only multiples of the quantum. The bits of the sum are then an
  integer: the number of quanta, plus the same integer for each block.
- All other numbers travel as several float32 numbers each (trainer/agreement/exact_sums.py).

The exponent e of each variable follows from the bounds of its last gradients, and is a part of the state. If
a block's gradient is too large for it, the ring's sum says so, and all ranks compute the step again with a
larger quantum. A common quantum could also be the maximum over all ranks. But then each rank would have to
keep the gradients of all its blocks until that is known, and would wait for one more all-reduce.

A gradient that is one product of matrices (`Dense`) is computed after all blocks of the rank, one variable
after the other. Until then, only its factors are kept. So the constant is added where the product is
computed, and a block's gradient is read again while it is in a cache.
"""

from __future__ import annotations

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
from edl.trainer.model.graphs import concrete, flat
from edl.trainer.model.model_support import is_scaled
from edl.trainer.records.batches import Batch, Following, nothing_follows
from edl.trainer.runtime.processor import vector_instructions
from edl.trainer.step.contribution import Contribution
from edl.trainer.step.finite import after, factors
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.overlapped import SALT, SEEDS, OverlappedStep
from edl.trainer.step.tracer import Graph

LIMIT = 0.999 * (1 << 22)  # quanta of a block's gradient: then all its sums have the constant's exponent
AIMED = 22  # bits of the bounds of BLOCKS blocks, in quanta: one may be at least four times the mean
SAFE = 21  # likewise, if the step is repeated: no block can be above LIMIT
EXPONENTS = -100, 100  # a job's first step begins with the last, and is repeated
KEPT = 1 << 10  # in place of an exponent: that of the state


class BlockContribution(Contribution):
    """The contribution of one block, as numbers whose sums are exact."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        count = len(self.model.trainable_variables)
        self.exponents = tf.Variable(
            tf.fill([count], EXPONENTS[1]), trainable=False, name="exponents_of_gradients"
        )
        # Those of a repeated attempt; not a part of the state.
        self.forced = tf.Variable(tf.fill([count], KEPT), trainable=False, name="exponents_of_attempt")
        self.factors = list[tf.TensorSpec]()  # of all products, in their order
        self._found = list[tf.Tensor]()  # these factors, while a graph is traced
        self._products: dict[int, tuple[bool, bool]] = {}  # by variable: which factor is transposed

    @property
    def parts_size(self) -> int:
        return WORDS * self.totals

    def _parts_of(self, values: tf.Tensor) -> tf.Tensor:
        return tf.concat(words(values, tf.round), 0)

    def _totals_from(self, sums: tf.Tensor) -> tf.Tensor:
        return decoded(tf.reshape(sums, [WORDS, -1]))

    @property
    def variables(self) -> list[tf.Variable]:
        return [*super().variables, self.forced]

    def make(self, *arguments: tf.Tensor) -> list[tf.Tensor]:
        """Compute a block's contribution; at its end are the factors of large gradients."""
        self._found = []
        made = super().make(*arguments)
        self.factors = [tf.TensorSpec(factor.shape, factor.dtype) for factor in self._found]
        return [*made, *self._found]

    def _seen(self, large: list[tf.Tensor]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        return [], large  # `_summands` sees bounds of them

    def _summands(
        self,
        large: list[tf.Tensor],
        ours: tf.Tensor,
        records: tf.Tensor,
        said: tf.Tensor,
        told: tf.Tensor,
        bad: tf.Tensor,
        empty: bool = False,
    ) -> list[tf.Tensor]:
        assert self.layout is not None
        exponents = _chosen(self.forced, self.exponents)
        numbers, bounds = [], []
        for g, i in zip(large, self.layout.large, strict=True):
            if empty:
                numbers.append(tf.cast(g, tf.int32))
                bounds.append(told)
            elif found := factors(g):
                left, right = (g.op.get_attr(f"transpose_{of}") for of in "ab")
                self._products[i] = left, right
                self._found += found
                numbers.append(tf.zeros([], tf.int32))
                bounds.append(_bound(found[0], found[1], left, right))
            else:
                numbers.append(tf.bitcast(g + _constant(exponents[i]), tf.int32))
                bounds.append(tf.maximum(tf.reduce_max(g), -tf.reduce_min(g)))
        most = tf.stack(bounds) if bounds else tf.zeros([0])
        values = tf.concat([ours, most, [told]], 0)
        wrong = ~tf.reduce_all(tf.abs(values) < LARGEST)  # or not finite
        quanta = most * power_of_two(tf.gather(exponents, tf.constant(self.layout.large, tf.int32)))
        over = tf.cast(quanta > LIMIT, tf.float32)
        block = tf.zeros_like(told) if empty else tf.ones_like(told)
        flags = [tf.zeros_like(bad), tf.maximum(bad, tf.cast(wrong, tf.float32))]
        rest = [*words(values, tf.round), over, [block, records], said, flags]
        return [*numbers, tf.concat(rest, 0)]

    def multiplied(self, numbers: Sequence[tf.Tensor], found: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Return the sums over this rank's blocks, with those of the products.

        Args:
            numbers: the other sums, and anything for each product.
            found: the factors of the first block, those of the next one, and so on.
        """
        assert self.layout is not None
        exponents, summed, at = _chosen(self.forced, self.exponents), list[tf.Tensor](), 0
        for number, i in zip(numbers, self.layout.large, strict=True):
            if i in self._products:
                (left, right), constant = self._products[i], _constant(exponents[i])
                terms = list[tf.Tensor]()
                for nth in range(at, len(found), len(self.factors)):
                    a, b = found[nth : nth + 2]
                    if summed:  # one after the other: the next one finds its memory in a cache
                        a = after(summed[-1], a)
                    product = tf.matmul(a, b, transpose_a=left, transpose_b=right)
                    constants = tf.fill([product.shape[1]], constant)
                    terms.append(tf.bitcast(tf.nn.bias_add(product, constants), tf.int32))
                number, at = tf.add_n(terms), at + 2
            summed.append(number)
        return summed

    def read(self, rest: tf.Tensor) -> list[tf.Tensor]:
        assert self.layout is not None
        size, large = self.layout.rest, len(self.layout.large)
        count = size + large + 1
        found, of_blocks, told = tf.split(rest, [WORDS * count, large + 1, control.LENGTH])
        values, bounds, loss = tf.split(decoded(tf.reshape(found, [WORDS, count])), [size, large, 1])
        told = tf.concat([told[: control.LOSS], loss, told[control.NONFINITE :]], 0)
        return [told, values, tf.concat([of_blocks, bounds], 0)]

    def sums(self, more: int = control.LENGTH) -> list[tf.TensorSpec]:
        assert self.layout is not None
        *specs, rest = super().sums(0)
        large, count = [tf.TensorSpec(spec.shape, tf.int32) for spec in specs], len(specs)
        if not more:
            of_blocks = [tf.TensorSpec([2 * count + 1], tf.float32), tf.TensorSpec([count], tf.int32)]
            return [*large, rest, *of_blocks]
        for nth, i in enumerate(self.layout.large):
            if i in self._products:
                large[nth] = tf.TensorSpec([], tf.int32)
        size = WORDS * (self.layout.rest + count + 1) + count + 1 + more
        return [*large, tf.TensorSpec([size], tf.float32)]

    def gradients(
        self, sums: Sequence[tf.Tensor], of_blocks: tf.Tensor, forced: tf.Tensor
    ) -> list[tf.Tensor]:
        """Return the sums of the large gradients, float32, and choose the exponents of the next step.

        Args:
            of_blocks: how many blocks are too large, by gradient; the number of blocks; the sums of bounds.
            forced: the exponents of a repeated step.
        """
        assert self.layout is not None
        large = self.layout.large
        if not large:
            return []
        blocks, bounds = of_blocks[len(large)], of_blocks[len(large) + 1 :]
        here, found = _chosen(forced, tf.gather(self.exponents, large)), []
        for nth, total in enumerate(sums):
            offset = tf.cast(blocks, tf.int32) * tf.bitcast(_constant(here[nth]), tf.int32)
            found.append(tf.cast(total - offset, tf.float32) * power_of_two(-here[nth]))
        most = bounds * (BLOCKS / blocks)
        wanted = tf.clip_by_value(AIMED - whole_logarithm(most), *EXPONENTS)
        update = tf.where(bounds > 0, wanted, here)
        self.exponents.scatter_nd_update([[i] for i in large], update)
        return found


def power_of_two(exponent: tf.Tensor) -> tf.Tensor:
    """2^exponent, exact, float32; at least 2^-126."""
    return tf.bitcast(tf.bitwise.left_shift(tf.maximum(exponent, -126) + 127, 23), tf.float32)


def whole_logarithm(number: tf.Tensor) -> tf.Tensor:
    """The binary logarithm of a positive float32, rounded down."""
    return tf.bitwise.right_shift(tf.bitcast(number, tf.int32), 23) - 127


def _chosen(forced: tf.Tensor, exponents: tf.Tensor) -> tf.Tensor:
    return tf.where(tf.equal(forced, KEPT), exponents, forced)


def _constant(exponent: tf.Tensor) -> tf.Tensor:
    """A number whose float32 neighbours are 2^-exponent apart, as far as LIMIT away."""
    return 1.5 * power_of_two(23 - exponent)


def _bound(a: tf.Tensor, b: tf.Tensor, transpose_a: bool, transpose_b: bool) -> tf.Tensor:
    """A bound of the elements of a product of matrices: the largest norms of rows and of columns."""
    squares = (
        tf.reduce_max(tf.reduce_sum(tf.square(a), 0 if transpose_a else 1)),
        tf.reduce_max(tf.reduce_sum(tf.square(b), 1 if transpose_b else 0)),
    )
    return tf.sqrt(squares[0]) * tf.sqrt(squares[1])


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
        indices = np.asarray(self.layout.large, int)
        forced = np.full(self._ours.forced.shape, KEPT, np.int32)
        while True:
            self._ours.forced.assign(forced)
            result = super().allreduce_step(*arguments)
            *given, of_blocks = result.given
            over, (_, *bounds) = np.split(np.asarray(of_blocks), [len(indices)])
            if result.agreed.nonfinite or not np.any(over):
                return replace(result, given=[*given, of_blocks, tf.constant(forced[indices])])
            exponents = np.clip(SAFE - np.frexp(bounds)[1], *EXPONENTS)
            forced[indices[over > 0]] = exponents[over > 0]

    def _carry_on(
        self, inputs: list[tf.Tensor], carried: list[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        count = len(self.layout.large) + 1
        made, found = super()._carry_on(inputs, carried[:count])
        return [*made, *carried[count:], *found], []

    def _sender(self, *signature: tf.TensorSpec) -> Graph:
        graphs: dict[int, Graph] = {}  # by the number of factors

        def send(*tensors: tf.Tensor) -> list[tf.Tensor]:
            found = len(tensors) - len(signature)
            if found not in graphs:
                blocks = found // len(self._ours.factors) if found else 0
                graphs[found] = flat(concrete(self._send_graph, *signature, *self._ours.factors * blocks))
            return graphs[found](*tensors)

        return send

    def _send_graph(self, call: tf.Tensor, *ours: tf.Tensor) -> list[tf.Tensor]:
        count = len(self.layout.large)
        large = self._ours.multiplied(ours[:count], ours[count + 1 :])
        return super()._send_graph(call, *large, ours[count])

    def _update_graph(self, whole: tf.Tensor, *sums: tf.Tensor) -> None:
        *large, rest, of_blocks, forced = sums
        super()._update_graph(whole, *self._ours.gradients(large, of_blocks, forced), rest)


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


def _generators() -> tuple[Any, ...]:
    """The state of Python's and NumPy's global generators of random numbers."""
    return random.getstate(), *(np.asarray(part).tobytes() for part in np.random.get_state())


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
