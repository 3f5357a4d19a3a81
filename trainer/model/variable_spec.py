"""What a variable is, without its value."""

from __future__ import annotations

from typing import NamedTuple


class Described(NamedTuple):
    """One variable of a learner's state."""

    name: str  # for people; no two of a state have the same
    dtype: str  # as NumPy and TensorFlow call it
    shape: tuple[int, ...]
    weight: bool = False  # it is trained: its values must be finite
    of_model: bool = False  # a weight or a moving average; else the optimizer's, or a count
