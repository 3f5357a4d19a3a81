"""The loss of a few records with the weights of a fixed pattern, by which the master compares workers.

All workers of a ring must compute the same function of weights and records. They do not if an environment
variable that the model's file reads, the version of a module, a constant that is drawn without a seed, or the
data differ between them. The configuration of the layers need not show that, but the loss does. The weights
themselves may differ at the start, because all workers take those of the root. So they are set to the same
pattern here, and the seeds of random layers to the same numbers.

The loss is computed three times: with the pattern, and with two variants whose numbers differ from it by
about as much as devices round off. How far the three losses are apart says how far two workers may be, for
example one with a GPU and one without. If they are very far apart, the loss is random or amplifies rounding
errors, and says nothing about the model. Then there is no sample loss, and the worker is not compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np

from trainer import control, snapshot
from trainer.data import Batch
from trainer.described import Described
from trainer.last_words import described
from trainer.learner import KerasLearner
from trainer.log import log
from trainer.own_step import OwnStepLearner
from trainer.ring.base import RingBroken
from trainer.roles import SampleLoss

# Relative differences between the losses of two workers: those that are always tolerated; the multiple of the
# difference between the three losses that is tolerated, too, as three of them may be equal by chance; and the
# largest such multiple for which the loss says something.
LEAST, TIMES, MOST = 1e-3, 8, 0.1
ROUNDING = 2.0**-10  # relative: twice what TF32 and float16 round off
PERIOD = 65_537  # numbers of the pattern; a prime, so that the rows of a matrix differ
STRIDE = 7_919  # between the places in the pattern at which two variables begin
FAN_IN = 1_024  # at most, because the first dimension of an embedding is no fan-in
FLOATS = ("float16", "float32", "float64")
SEED = "seed_generator_state"


def sample_loss(learner: KerasLearner | OwnStepLearner, read: Callable[[], Batch]) -> SampleLoss | None:
    """Compute the mean loss of a batch with fixed weights.

    The learner's ring must be up. Its state is restored afterwards.

    Args:
        read: returns the batch. It is called for each of the three losses, so that random numbers in the
            user's `feed` show.

    Returns:
        None if the three losses are too far apart, or one of them is not finite or cannot be computed.

    Raises:
        RingBroken: the ring was cut meanwhile.
    """
    before = learner.kept()
    try:
        losses = list(_losses(learner, read))
    finally:
        learner.restore(before)
    if not all(map(math.isfinite, losses)):
        return None
    largest = max(map(abs, losses))
    tolerance = max(LEAST, TIMES * (max(losses) - min(losses)) / largest) if largest else LEAST
    return SampleLoss(losses[0], tolerance) if tolerance <= MOST else None


def _losses(learner: KerasLearner | OwnStepLearner, read: Callable[[], Batch]) -> Iterator[float]:
    numbers = np.random.RandomState(0).uniform(-1, 1, PERIOD)  # the same in all versions of NumPy
    for seed in (None, 1, 2):
        changed = numbers
        if seed is not None:
            changed = numbers * (1 + ROUNDING * np.random.RandomState(seed).uniform(-1, 1, PERIOD))
        _fill(learner, changed)
        batch = read()
        try:
            sums = learner.sums(batch, control.write(0), 0, 0, len(batch))
        except RingBroken:
            raise
        except Exception as error:  # the model may check its values, which are not those of a training
            log.info(f"workers are not compared by their loss: {described(error)}")
            yield math.nan
            return
        yield math.nan if sums.agreed.nonfinite else sums.agreed.loss


def _fill(learner: KerasLearner | OwnStepLearner, numbers: np.ndarray) -> None:
    """Set the weights of the model to a pattern of these numbers, and its seeds to fixed ones.

    One variable at a time is set, without a copy, so that no second model must fit into memory.
    """
    for place, variable in enumerate(learner.described()):
        if variable.of_model and variable.dtype in FLOATS:
            size = math.prod(variable.shape)
            part = snapshot.room(size * np.dtype(variable.dtype).itemsize)
            flat = part.view(variable.dtype)
            pattern = np.resize(np.roll(_scaled(numbers, variable), -place * STRIDE), min(size, PERIOD))
            for start in range(0, size, PERIOD):
                flat[start : start + PERIOD] = pattern[: size - start]
        elif variable.name.rpartition("/")[2].startswith(SEED):
            part = np.arange(math.prod(variable.shape), dtype=variable.dtype).view(np.uint8)
        else:
            continue
        learner.change({place: part})


def _scaled(numbers: np.ndarray, variable: Described) -> np.ndarray:
    """Scale numbers between -1 and 1 so that the layers of any model neither vanish nor explode.

    A vector may be a variance or a scale, so it is positive. A matrix has about the variance of 1 / fan-in.
    """
    if len(variable.shape) < 2:
        return 1 + numbers / 2
    fan_in = math.prod(variable.shape[:-1])
    return numbers * math.sqrt(3 / max(1, min(fan_in, FAN_IN)))
