# SPDX-License-Identifier: Apache-2.0
"""The loss of a few records with the weights of a fixed pattern, by which the master compares workers.

All workers of a ring must compute the same function of weights and records. They do not if an environment
variable that the model's file reads, the version of a module, a constant that is drawn without a seed, or the
data differ between them. The configuration of the layers need not show that, but the loss does. The weights
themselves may differ at the start, because all workers take those of the root. So they are set to the same
pattern here, and the seeds of random layers to the same numbers.

The loss is computed three times. If it is not the same twice with the same weights, the model or the records
are drawn at random. The third time, the weights differ by about as much as devices round off: how much this
changes the loss says how far two workers may be apart, for example one with a GPU and one without. A worker
whose loss is random, or amplifies rounding errors too much, reports none and is not compared.

A job that predicts has no loss: a norm of the model's outputs takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from edl.trainer.agreement import control
from edl.trainer.model import snapshot
from edl.trainer.model.variable_spec import VariableSpec
from edl.trainer.records.batches import Batch
from edl.trainer.ring.base import RingBroken
from edl.trainer.runtime.error_report import format_error
from edl.trainer.runtime.log import log
from edl.trainer.step.interfaces import SampleLoss
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.own_step import OwnStepLearner

SAME = 1e-5  # relative: a GPU may add up in another order
ROUNDING = 2.0**-10  # relative: twice what TF32 and float16 round off
# The relative difference between two workers that is always tolerated; the multiple of what rounding changes
# (which may be little by chance) that is tolerated as well; the largest tolerance of a loss that is reported.
MINIMUM, TIMES, MAXIMUM = 1e-3, 8, 0.1
PERIOD = 65_537  # numbers of the pattern; a prime, so that the rows of a matrix differ
STRIDE = 7_919  # between the places in the pattern at which two variables begin
FAN_IN = 1_024  # at most, because the first dimension of an embedding is no fan-in
FLOATS = ("float16", "float32", "float64")
SEED = "seed_generator_state"


class Changeable(Protocol):
    """A model whose weights can be set and put back, as a learner has it."""

    def variable_specs(self) -> list[VariableSpec]:
        """Describe the variables of the state."""
        ...

    def change(self, values: Mapping[int, np.ndarray]) -> None:
        """Set some of these variables, by index, to values of uint8 [bytes]."""
        ...

    def kept(self) -> Any:
        """Return a copy of the state for `restore`."""
        ...

    def restore(self, kept: Any) -> None:
        """Put back the state that `kept` has returned."""
        ...


def sample_loss(learner: KerasLearner | OwnStepLearner, read: Callable[[], Batch]) -> SampleLoss | None:
    """Compute the mean loss of a batch with fixed weights, by a step of the learner.

    The learner's ring must be up. Its state is restored afterwards.

    Args:
        read: returns the batch. It is called for each of the three losses, so that random numbers in the
            user's `feed` show.

    Returns:
        None if the loss is random, not finite or too sensitive to rounding, or cannot be computed.

    Raises:
        RingBroken: the ring was cut meanwhile.
    """

    def loss(batch: Batch) -> float:
        agreed = learner.allreduce_step(batch, control.write(0), 0, 0, len(batch)).agreed
        return math.nan if agreed.nonfinite else agreed.loss

    return with_fixed_weights(learner, read, loss)


def with_fixed_weights(
    learner: Changeable, read: Callable[[], Batch], compute: Callable[[Batch], float]
) -> SampleLoss | None:
    """Compute a number of a batch with fixed weights. The learner's state is restored afterwards.

    Args:
        read: returns the batch. It is called for each of the three computations.
        compute: returns the number; nan if it does not exist.

    Returns:
        None if the number is random, not finite or too sensitive to rounding, or cannot be computed.

    Raises:
        RingBroken: the ring was cut meanwhile.
    """
    before = learner.kept()
    try:
        numbers = np.random.RandomState(0).uniform(-1, 1, PERIOD)  # the same in all versions of NumPy
        _fill(learner, numbers)
        loss = _computed(compute, read())
        if not math.isfinite(loss) or not abs(_computed(compute, read()) - loss) <= SAME * abs(loss):
            return None
        _fill(learner, numbers * (1 + ROUNDING * np.random.RandomState(1).uniform(-1, 1, PERIOD)))
        change = abs(_computed(compute, read()) - loss)
    finally:
        learner.restore(before)
    if not change <= MAXIMUM / TIMES * abs(loss):
        return None
    return SampleLoss(loss, max(MINIMUM, TIMES * change / abs(loss)) if loss else MINIMUM)


def output_norm(outputs: Mapping[str, np.ndarray]) -> float:
    """Reduce a model's outputs to one number, by which workers that predict are compared.

    Each output of floating-point numbers contributes its distance from a fixed pattern of its own magnitude,
    so that signs count. The geometric mean lets outputs of all magnitudes count. Integers do not count:
    rounding can change which class is the most likely one.

    Returns:
        nan if there is no output of floating-point numbers.
    """
    pattern = np.random.RandomState(2).uniform(-1, 1, PERIOD)
    floats = [values for _, values in sorted(outputs.items()) if values.dtype.kind in "fc"]
    distances = [_distance(values, pattern) for values in floats]
    if not distances:
        return math.nan
    return math.exp(sum(math.log(distance) for distance in distances if distance) / len(distances))


def _distance(values: np.ndarray, pattern: np.ndarray) -> float:
    """The root mean square distance of values from a pattern that is scaled to their magnitude."""
    flat = np.abs(values) if values.dtype.kind == "c" else values
    flat = flat.astype(np.float64).reshape(-1)
    if not flat.size:
        return 0.0
    magnitude = math.sqrt(np.mean(flat**2))
    return math.sqrt(np.mean((flat - magnitude * np.resize(pattern, flat.size)) ** 2))


def _computed(compute: Callable[[Batch], float], batch: Batch) -> float:
    """Compute the number of the batch; nan if it cannot be computed.

    Raises:
        RingBroken: a member of the ring left or failed.
    """
    try:
        return compute(batch)
    except RingBroken:
        raise
    except Exception as error:  # the model may check its values, which are not those of a training
        log.info(f"workers are not compared by their loss: {format_error(error)}")
        return math.nan


def _fill(learner: Changeable, numbers: np.ndarray) -> None:
    """Set the weights of the model to a pattern of these numbers, and its seeds to fixed ones.

    One variable at a time is set, without a copy, so that no second model must fit into memory.
    """
    for place, variable in enumerate(learner.variable_specs()):
        if variable.of_model and variable.dtype in FLOATS:
            size = math.prod(variable.shape)
            part = snapshot.allocate(size * np.dtype(variable.dtype).itemsize)
            flat = part.view(variable.dtype)
            pattern = np.resize(np.roll(_scaled(numbers, variable), -place * STRIDE), min(size, PERIOD))
            for start in range(0, size, PERIOD):
                flat[start : start + PERIOD] = pattern[: size - start]
        elif variable.name.rpartition("/")[2].startswith(SEED):
            part = np.arange(math.prod(variable.shape), dtype=variable.dtype).view(np.uint8)
        else:
            continue
        learner.change({place: part})


def _scaled(numbers: np.ndarray, variable: VariableSpec) -> np.ndarray:
    """Scale numbers between -1 and 1 so that the layers of any model neither vanish nor explode.

    A vector may be a variance or a scale, so it is positive. A matrix has about the variance of 1 / fan-in.
    """
    if len(variable.shape) < 2:
        return 1 + numbers / 2
    fan_in = math.prod(variable.shape[:-1])
    return numbers * math.sqrt(3 / max(1, min(fan_in, FAN_IN)))
