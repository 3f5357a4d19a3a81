# SPDX-License-Identifier: Apache-2.0
"""The state of a user's own training loop: variables, NumPy arrays, and state behind functions.

A newcomer is sent these values, a checkpoint holds them, and their digests show a worker whose state has
changed by itself. A state of another library (JAX, PyTorch) is given as two functions: one that returns its
arrays, and one that replaces them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import xxhash

from edl.data import nest
from edl.errors import ModelError
from edl.trainer.model import tensors
from edl.trainer.model.variable_spec import VariableSpec

WORDS, WORD = 2, 4096  # of a variable's digest: the sums of up to 4096 ranks are exact in float32
EXPECTED = (
    "state holds tf.Variables, Keras variables, writable NumPy arrays, objects with .variables (models, "
    "optimizers, tf.Modules), edl.state(get, set), and lists, tuples or dicts of these"
)
NAMED = 5  # variables in a message
REPLACED = (
    "the loop makes new arrays, and `state` holds the first ones: write `W -= ...` or `W[...] = ...` in "
    "place of `W = W - ...`, or pass edl.state(get, set), whose get returns the present arrays"
)
MISSING = (
    "something that the loop changes is missing from `state` (an optimizer's variables, averages, a counter, "
    "a random generator)"
)


@dataclass(frozen=True)
class Functions:
    """State behind two functions.

    Args:
        get: returns an array, or a list, tuple or dict of arrays.
        set: takes the same with other values, as NumPy arrays.
    """

    get: Callable[[], Any]
    set: Callable[[Any], object]


class Group(Protocol):
    """Some of the variables of a state."""

    names: list[str]

    def arrays(self) -> list[np.ndarray]:
        """The present values; later updates do not change them."""
        ...

    def prepared(self, parts: list[np.ndarray]) -> Any:
        """Convert parts, uint8 [bytes] each, for `put`, on any thread."""
        ...

    def put(self, values: Any) -> None:
        """Replace the values by what `prepared` has returned."""
        ...


class Tensors:
    """Variables of TensorFlow and Keras."""

    def __init__(self, names: list[str], variables: list[Any]):
        self.names, self._variables = names, variables

    def arrays(self) -> list[np.ndarray]:
        """The present values."""
        return [tensors.array(v.read_value()) for v in self._variables]

    def prepared(self, parts: list[np.ndarray]) -> Any:
        from edl.trainer.model import snapshot

        return snapshot.prepared(self._variables, parts)

    def put(self, values: Any) -> None:
        """Set the values that `prepared` has returned."""
        from edl.trainer.model import snapshot

        snapshot.take_over(self._variables, values)


class Arrays:
    """NumPy arrays, which are changed in place."""

    def __init__(self, names: list[str], arrays: list[np.ndarray]):
        self.names, self._arrays = names, arrays

    def arrays(self) -> list[np.ndarray]:
        return [np.array(a, order="C") for a in self._arrays]

    def prepared(self, parts: list[np.ndarray]) -> Any:
        return _viewed(parts, self._arrays)

    def put(self, values: Any) -> None:
        for array, value in zip(self._arrays, values, strict=True):
            array[...] = value


class Behind:
    """State behind functions (`Functions`)."""

    def __init__(self, name: str, functions: Functions):
        self._name, self._functions = name, functions
        self._like = functions.get()
        leaves = list(nest.leaves(self._like))
        self.names = [name + path for path, _ in leaves]
        self._shapes = [_known(n, np.asarray(leaf)) for n, (_, leaf) in zip(self.names, leaves, strict=True)]

    def arrays(self) -> list[np.ndarray]:
        """The present values, as the user's `get` returns them.

        Raises:
            ModelError: shapes or types have changed.
        """
        leaves = [np.array(leaf, order="C") for leaf in nest.flatten(self._functions.get())]
        found = [(leaf.shape, leaf.dtype) for leaf in leaves]
        if found != (expected := [(a.shape, a.dtype) for a in self._shapes]):
            raise ModelError(f"{self._name}: get() returns arrays of {found}; it returned {expected} before")
        return leaves

    def prepared(self, parts: list[np.ndarray]) -> Any:
        return nest.pack(self._like, _viewed(parts, self._shapes))

    def put(self, values: Any) -> None:
        self._functions.set(values)


class LoopState:
    """All variables of a loop's state.

    Args:
        state: see EXPECTED.

    Raises:
        ModelError: something in it is none of these, or there is no variable at all.
    """

    def __init__(self, state: Any):
        self.sources: list[tuple[Any, int]] = []  # objects with variables, and how many they had
        variables: dict[int, tuple[str, Any]] = {}
        arrays: dict[int, tuple[str, np.ndarray]] = {}
        self.seeds: list[Any] = []  # of Keras' random layers, which each step sets anew
        behind: list[Behind] = []
        for name, item in self._flat("state", state):
            if isinstance(item, Functions):
                behind.append(Behind(name, item))
            elif isinstance(item, np.ndarray):
                arrays.setdefault(id(item), (name, _known(name, item, writable=True)))
            elif is_seed(item):
                self.seeds.append(plain(item))
            else:
                path = str(getattr(item, "path", item.name)).partition(":")[0]
                variables.setdefault(id(plain(item)), (path, plain(item)))
        self._groups: list[Group] = [
            *([Tensors(*map(list, zip(*variables.values(), strict=True)))] if variables else []),
            Arrays([n for n, _ in arrays.values()], [a for _, a in arrays.values()]),
            *behind,
        ]
        if not self.names:
            raise ModelError(
                f"edl.join(state=...) has no variables: a new worker would be sent nothing. {EXPECTED}"
            )

    def add(self, name: str, array: np.ndarray) -> None:
        """Add one more array, which is changed in place."""
        self._groups.append(Arrays([name], [array]))

    @property
    def names(self) -> list[str]:
        """A unique name for each variable."""
        times, found = Counter[str](), list[str]()
        for name in (name for group in self._groups for name in group.names):
            times[name] += 1
            found.append(name if times[name] == 1 else f"{name}#{times[name]}")
        return found

    def specs(self) -> list[VariableSpec]:
        """Describe the arrays of the state."""
        arrays = self.arrays()
        return [VariableSpec(n, a.dtype.name, a.shape) for n, a in zip(self.names, arrays, strict=True)]

    def arrays(self) -> list[np.ndarray]:
        """The present values; later updates do not change them."""
        return [array for group in self._groups for array in group.arrays()]

    def parts(self) -> list[np.ndarray]:
        """The present values, uint8 [bytes] each."""
        return [array.reshape(-1).view(np.uint8) for array in self.arrays()]

    def prepared(self, parts: list[np.ndarray]) -> list[Any]:
        """Convert a different worker's `parts` for `take_over`, on any thread; empties the list.

        Raises:
            ModelError: they are not of this state.
        """
        given, expected = [len(part) for part in parts], [array.nbytes for array in self.arrays()]
        if given != expected:
            raise ModelError(
                f"the ring's state has {len(given)} variables of {sum(given)} bytes, this worker's has "
                f"{len(expected)} of {sum(expected)}"
            )
        values = []
        for group in self._groups:
            ours, parts[: len(group.names)] = parts[: len(group.names)], []
            values.append(group.prepared(ours))
        return values

    def take_over(self, values: list[Any]) -> None:
        """Replace the state by what `prepared` has returned."""
        for group, value in zip(self._groups, values, strict=True):
            group.put(value)

    def set_seeds(self, words: np.ndarray) -> None:
        """Set the states of Keras' seed generators, uint32 [2]."""
        for v in self.seeds:
            v.assign(np.broadcast_to(words, v.shape).astype(v.dtype.as_numpy_dtype))

    def digests(self) -> np.ndarray:
        """A digest of each variable as small integers, float32 [variables, WORDS]."""
        words = [xxhash.xxh3_64_intdigest(part.data) for part in self.parts()]
        return np.array([(w % WORD, w // WORD % WORD) for w in words], np.float32)

    def grown(self) -> str:
        """The name of an object in the state that has other variables now than at the start; else empty."""
        for item, had in self.sources:
            if (has := len(list(item.variables))) != had:
                return f"{type(item).__name__} (it had {had} variables, and has {has})"
        return ""

    def _flat(self, name: str, item: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(item, Functions | np.ndarray) or _is_variable(item):
            yield name, item
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                yield from self._flat(str(key) if name == "state" else f"{name}/{key}", inner)
        elif isinstance(item, Sequence) and not isinstance(item, str | bytes):
            for i, inner in enumerate(item):
                yield from self._flat(f"{name}[{i}]", inner)
        elif (variables := getattr(item, "variables", None)) is not None and not callable(variables):
            if not getattr(item, "built", True):
                build = f"call {type(item).__name__}.build(...) before edl.join()"
                raise ModelError(f"{name} is not built, so its variables do not exist yet: {build}")
            self.sources.append((item, len(list(variables))))
            yield from self._flat(name, list(variables))
        else:
            raise ModelError(f"{name} is of type {type(item).__name__}: {EXPECTED}")


def named(names: Sequence[str]) -> str:
    """The first few of these variables in words; empty without names."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} others" if len(names) > NAMED else "")


def is_seed(v: Any) -> bool:
    """Whether it is the state of a Keras seed generator."""
    name = str(getattr(v, "path", v.name)).partition(":")[0]
    return name.rpartition("/")[2] == "seed_generator_state"


def plain(v: Any) -> Any:
    """Return TensorFlow's variable behind one of Keras; a variable of TensorFlow is returned unchanged."""
    return v._value if hasattr(v, "_value") else v


def _is_variable(item: Any) -> bool:
    modules = (sys.modules.get(name) for name in ("tensorflow", "keras"))
    return isinstance(item, tuple(module.Variable for module in modules if module is not None))


def _known(name: str, array: np.ndarray, writable: bool = False) -> np.ndarray:
    if array.dtype.hasobject:
        raise ModelError(f"{name} is an array of objects; a state holds numbers")
    if writable and not array.flags.writeable:
        raise ModelError(f"{name} is a read-only array; edl writes a received state into it")
    return array


def _viewed(parts: list[np.ndarray], like: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(p).view(a.dtype).reshape(a.shape) for p, a in zip(parts, like, strict=True)]
