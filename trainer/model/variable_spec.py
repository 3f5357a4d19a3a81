# SPDX-License-Identifier: Apache-2.0
"""The description of a variable, without its value."""

from __future__ import annotations

from typing import NamedTuple


class VariableSpec(NamedTuple):
    """One variable of a learner's state."""

    name: str  # unique in the state
    dtype: str  # as NumPy and TensorFlow call it
    shape: tuple[int, ...]
    weight: bool = False  # the variable is trained: its values must be finite
    of_model: bool = False  # a weight or a moving average; else a variable of the optimizer, or a counter
