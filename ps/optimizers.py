"""How a row is updated: Keras' optimizers, by their JSON, equal to Keras' own on a variable of these rows.

What Keras does to all rows of a variable in each step (momentum that decays without a gradient), is done here
only to the rows that a step has: the others have not changed when nothing was learned about them.

What an optimizer does that concerns more than one row, or rows that a step does not have, is refused by its
name: weight decay, moving averages of weights, clipping, accumulation over several steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ps import native
from ps.errors import Invalid
from ps.initializers import serialized

f32 = np.float32
Update: TypeAlias = Callable[[np.ndarray, int, int, np.ndarray, np.ndarray, float, float, int], None]
_REFUSED = (
    "weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "gradient_accumulation_steps",
    "amsgrad",
)  # fmt: skip


@dataclass(frozen=True)
class Optimizer:
    """
    Args:
        slots: values that it keeps for each value of a row.
        first, second: what these are at the beginning.
        learning_rate: its own; None: it is not a number.
        update: (rows, stride, dim, slots of rows, sums of gradients, scale, learning rate, iteration).
    """

    name: str
    slots: int
    first: float
    second: float
    learning_rate: float | None
    update: Update


def parse(text: str, table: str) -> Optimizer:
    """
    Args:
        text: as `keras.optimizers.serialize` has it, in JSON.

    Raises:
        Invalid: it is not one that a server knows, or does what a server does not.
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
        case "SGD" if not value("momentum", 0.0):
            return Optimizer(name, 0, 0.0, 0.0, rate, _sgd)
        case "SGD":
            return Optimizer(
                name, 1, 0.0, 0.0, rate, _momentum(f32(value("momentum", 0.0)), bool(config["nesterov"]))
            )
        case "Adagrad":
            begins = value("initial_accumulator_value", 0.1)
            return Optimizer(name, 1, begins, 0.0, rate, _adagrad(f32(value("epsilon", 1e-7))))
        case "Adam":
            return Optimizer(name, 2, 0.0, 0.0, rate, _adam(
                value("beta_1", 0.9), value("beta_2", 0.999), f32(value("epsilon", 1e-7))
            ))  # fmt: skip
        case "Ftrl":
            begins = value("initial_accumulator_value", 0.1)
            return Optimizer(name, 2, begins, 0.0, rate, _ftrl(
                -value("learning_rate_power", -0.5), value("l1_regularization_strength", 0.0),
                value("l2_regularization_strength", 0.0), value("l2_shrinkage_regularization_strength", 0.0),
                value("beta", 0.0),
            ))  # fmt: skip
    return None


def _sgd(
    rows: np.ndarray, stride: int, dim: int, slots: np.ndarray, sums: np.ndarray,
    scale: float, learning_rate: float, iteration: int,
) -> None:  # fmt: skip
    native.sgd(rows, stride, dim, slots, sums, f32(scale), f32(learning_rate))


def _momentum(decay: np.float32, nesterov: bool) -> Update:
    def update(
        rows: np.ndarray, stride: int, dim: int, slots: np.ndarray, sums: np.ndarray,
        scale: float, learning_rate: float, iteration: int,
    ) -> None:  # fmt: skip
        native.momentum(rows, stride, dim, slots, sums, f32(scale), f32(learning_rate), decay, nesterov)

    return update


def _adagrad(epsilon: np.float32) -> Update:
    def update(
        rows: np.ndarray, stride: int, dim: int, slots: np.ndarray, sums: np.ndarray,
        scale: float, learning_rate: float, iteration: int,
    ) -> None:  # fmt: skip
        native.adagrad(rows, stride, dim, slots, sums, f32(scale), f32(learning_rate), epsilon)

    return update


def _adam(beta_1: float, beta_2: float, epsilon: np.float32) -> Update:
    def update(
        rows: np.ndarray, stride: int, dim: int, slots: np.ndarray, sums: np.ndarray,
        scale: float, learning_rate: float, iteration: int,
    ) -> None:  # fmt: skip
        one, turn = f32(1.0), f32(iteration + 1)
        power_1, power_2 = np.power(f32(beta_1), turn), np.power(f32(beta_2), turn)
        alpha = f32(learning_rate) * np.sqrt(one - power_2) / (one - power_1)
        rest_1, rest_2 = f32(1.0 - beta_1), f32(1.0 - beta_2)
        native.adam(rows, stride, dim, slots, sums, f32(scale), alpha, rest_1, rest_2, epsilon)

    return update


def _ftrl(power: float, l1: float, l2: float, shrinkage: float, beta: float) -> Update:
    def update(
        rows: np.ndarray, stride: int, dim: int, slots: np.ndarray, sums: np.ndarray,
        scale: float, learning_rate: float, iteration: int,
    ) -> None:  # fmt: skip
        lr = f32(learning_rate)
        both = f32(l2) + f32(beta) / (f32(2.0) * lr)
        native.ftrl(
            rows, stride, dim, slots, sums, f32(scale), lr, f32(power), f32(l1), both, f32(2.0 * shrinkage)
        )

    return update
