# SPDX-License-Identifier: Apache-2.0
"""The interface between own loops and a framework: what a loop's state and gradients consist of.

A framework has one file, `of_NAME.py`, with a subclass of `Adapter`. That file imports the framework, and is
imported once the user's script has imported it (trainer/model/tensors.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

Children: TypeAlias = tuple[list[tuple[str, Any]], Callable[[Sequence[Any]], Any]]


@dataclass(frozen=True, eq=False)
class Spec:
    """The type of a tensor, without its values.

    Args:
        shape: of the tensor.
        dtype: its name.
        is_float: whether it has real floating-point numbers.
        restore: returns an array, [shape] of float32 or float64, as a tensor of this kind, dtype and device.
            The tensor may share the array's memory.
    """

    shape: tuple[int, ...]
    dtype: str
    is_float: bool
    restore: Callable[[np.ndarray], Any]


class Group(Protocol):
    """Some of the variables of a loop's state."""

    @property
    def names(self) -> list[str]:
        """A name for each variable. The list may grow while the loop is tried."""
        ...

    def arrays(self) -> list[np.ndarray]:
        """The present values; later updates do not change them."""
        ...

    def prepared(self, parts: list[np.ndarray]) -> Any:
        """Convert parts, uint8 [bytes] each, for `put`, on any thread."""
        ...

    def put(self, values: Any) -> None:
        """Replace the values by what `prepared` has returned."""
        ...

    def begin(self) -> None:
        """Prepare for the next turn of the loop."""
        ...

    def settle(self) -> None:
        """Refuse further variables from now on: all workers must have the same ones."""
        ...


class Adapter:
    """One framework. A method returns None for a value that the framework does not know."""

    def array(self, value: Any) -> np.ndarray | None:
        """A tensor's values in host memory, without a copy if they are there."""
        return None

    def spec(self, value: Any) -> Spec | None:
        """The type of a tensor."""
        return None

    def children(self, node: Any) -> Children | None:
        """The entries of a container of this framework, by name, and a function that rebuilds it."""
        return None

    def identity(self, item: Any) -> Any:
        """The object that holds an item's values: equal for two handles of one variable."""
        return item

    def group(self, name: str, item: Any) -> Group | None:
        """The variables of an entry of a loop's state.

        Raises:
            ModelError: its values cannot be copied.
        """
        return None

    def is_symbolic(self, value: Any) -> bool:
        """Whether a tensor belongs to a function that is being traced, and has no values."""
        return False

    def records(self, data: Any) -> Callable[[np.ndarray], Any] | None:
        """How a loop is given the arrays of its records, if `data` is this framework's."""
        return None

    def taken(self, module: Any) -> Children | None:
        """The gradients that a module holds. They are removed; the function puts means in their place."""
        return None


def viewed(parts: list[np.ndarray], like: Sequence[np.ndarray]) -> list[np.ndarray]:
    """View each part, uint8 [bytes], as an array of the type and shape of its entry in `like`."""
    return [np.asarray(p).view(a.dtype).reshape(a.shape) for p, a in zip(parts, like, strict=True)]
