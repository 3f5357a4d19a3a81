# SPDX-License-Identifier: Apache-2.0
"""Row updates by Keras' optimizers, from their JSON; equal to Keras' own updates of a variable of these rows.

Keras updates all rows of a variable in each step (momentum also decays without a gradient). Here only the
rows of a step are updated: a row does not change while nothing is learned about it.

Options that concern more than one row, or rows that a step does not have, are refused by name: weight decay,
moving averages of weights, clipping, accumulation over several steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from edl.ps.errors import Invalid
from edl.ps.table import kernels
from edl.ps.table.initializers import serialized

f32 = np.float32
Rates: TypeAlias = Callable[[np.float32, int], tuple[np.float32, ...]]
_REFUSED = (
    "weight_decay",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "use_ema",
    "gradient_accumulation_steps",
    "amsgrad",
)


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as the kernels need it.

    Args:
        kind: SGD to FTRL, in `kernels`.
        slots: the number of slot values for each value of a row.
        first, second: the initial values of the slots.
        learning_rate: the optimizer's own learning rate; None if it is not a number.
        rates: computes the `rates` of `kernels.Update` from a learning rate and the iteration.
    """

    name: str
    kind: int
    slots: int
    first: float
    second: float
    learning_rate: float | None
    rates: Rates


def parse(text: str, table: str) -> Optimizer:
    """Parse a serialized Keras optimizer.

    Args:
        text: the result of `keras.optimizers.serialize`, in JSON.

    Raises:
        Invalid: servers do not support this optimizer, or one of its options.
    """
    name, config = serialized(text, f"table {table!r}: optimizer")
    where = f"table {table!r}: optimizer {name}"
    if used := [key for key in _REFUSED if config.get(key)]:
        raise Invalid(
            f"{where}: {used[0]}={config[used[0]]!r} is not supported for rows on parameter servers: "
            "leave it out"
        )
    if config.get("loss_scale_factor") not in (None, 1, 1.0):
        raise Invalid(
            f"{where}: loss_scale_factor is not supported for rows on parameter servers: leave it out"
        )
    rate = config.get("learning_rate", 0.001)
    learning_rate = float(rate) if isinstance(rate, int | float) else None
    try:
        made = _parse(name, config, learning_rate)
    except (KeyError, TypeError, ValueError) as error:
        raise Invalid(f"{where}: {type(error).__name__}: {error}") from error
    if made is None:
        raise Invalid(
            f"{where} is not supported for rows on parameter servers: expected SGD, Adagrad, Adam or Ftrl"
        )
    return made


def _parse(name: str, config: Mapping[str, Any], rate: float | None) -> Optimizer | None:
    def value(key: str, default: float) -> float:
        return float(config.get(key, default))

    match name:
        case "SGD":
            decay = f32(value("momentum", 0.0))
            if not decay:
                return Optimizer(name, kernels.SGD, 0, 0.0, 0.0, rate, lambda rate, _: (rate,))
            kind = kernels.NESTEROV if config["nesterov"] else kernels.MOMENTUM
            return Optimizer(name, kind, 1, 0.0, 0.0, rate, lambda rate, _: (rate, decay))
        case "Adagrad":
            begins, epsilon = value("initial_accumulator_value", 0.1), f32(value("epsilon", 1e-7))
            return Optimizer(name, kernels.ADAGRAD, 1, begins, 0.0, rate, lambda rate, _: (rate, epsilon))
        case "Adam":
            betas = value("beta_1", 0.9), value("beta_2", 0.999)
            return Optimizer(
                name, kernels.ADAM, 2, 0.0, 0.0, rate, _adam(*betas, f32(value("epsilon", 1e-7)))
            )
        case "Ftrl":
            begins = value("initial_accumulator_value", 0.1)
            return Optimizer(
                name,
                kernels.FTRL,
                2,
                begins,
                0.0,
                rate,
                _ftrl(
                    -value("learning_rate_power", -0.5),
                    value("l1_regularization_strength", 0.0),
                    value("l2_regularization_strength", 0.0),
                    value("l2_shrinkage_regularization_strength", 0.0),
                    value("beta", 0.0),
                ),
            )
    return None


def _adam(beta_1: float, beta_2: float, epsilon: np.float32) -> Rates:
    """Compute the bias-corrected learning rate, 1 - beta_1, 1 - beta_2, and epsilon."""

    def rates(learning_rate: np.float32, iteration: int) -> tuple[np.float32, ...]:
        one, turn = f32(1.0), f32(iteration + 1)
        power_1, power_2 = np.power(f32(beta_1), turn), np.power(f32(beta_2), turn)
        alpha = learning_rate * np.sqrt(one - power_2) / (one - power_1)
        return alpha, f32(1.0 - beta_1), f32(1.0 - beta_2), epsilon

    return rates


def _ftrl(power: float, l1: float, l2: float, shrinkage: float, beta: float) -> Rates:
    """Compute the learning rate, its negated power, l1, l2 plus the share of `beta`, twice the shrinkage."""

    def rates(learning_rate: np.float32, iteration: int) -> tuple[np.float32, ...]:
        both = f32(l2) + f32(beta) / (f32(2.0) * learning_rate)
        return learning_rate, f32(power), f32(l1), both, f32(2.0 * shrinkage)

    return rates
