# SPDX-License-Identifier: Apache-2.0
"""Values of metrics as Keras has them: a number, or nested lists of numbers for a result with dimensions.

`F1Score(average=None)` gives a value for each class, and a metric whose result is a dict gives each of its
entries by its own name. The history and the callbacks have all of it; where only numbers fit (messages to the
master, what is compared to find the best checkpoint), each element has a name of its own: `f1[0]`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

Value: TypeAlias = "float | list[Any]"


def values_of(results: Mapping[str, Any]) -> dict[str, Value]:
    """Return results by name as plain values. The entries of a dict replace it, as in Keras.

    The values are copies: a result may be a variable that is reset later.
    """
    found: dict[str, Value] = {}
    for name, result in results.items():
        if isinstance(result, dict):
            found |= values_of(result)
        else:
            found[name] = value_of(result)
    return found


def value_of(result: Any) -> Value:
    """Convert a metric's result, a number or an array, to a float or nested lists of floats."""
    value: Value = np.asarray(result).astype(np.float64).tolist()
    return value


def mapped(value: Value, function: Callable[[Any], Any]) -> Any:
    """The value with `function` applied to each of its numbers."""
    return [mapped(v, function) for v in value] if isinstance(value, list) else function(value)


def as_numbers(values: Mapping[str, Value]) -> dict[str, float]:
    """Return one number for each name. Elements of lists are named by index: `name[0]`."""
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            found |= as_numbers({f"{name}[{i}]": v for i, v in enumerate(value)})
        else:
            found[name] = value
    return found
