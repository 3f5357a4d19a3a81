# SPDX-License-Identifier: Apache-2.0
"""The state of a user's own training loop: objects of any framework, NumPy arrays, and two functions.

A newcomer is sent these values, a checkpoint holds them, and their digests show a worker whose state has
changed by itself. Each framework has a file that knows its objects (trainer/model/adapter.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from edl.errors import ModelError
from edl.trainer.model import tensors
from edl.trainer.model.adapter import Group, viewed
from edl.trainer.model.variable_spec import VariableSpec

WORDS, WORD = 2, 4096  # of a variable's digest: the sums of up to 4096 ranks are exact in float32
EXPECTED = (
    "state holds modules, optimizers and schedulers of PyTorch, models and optimizers of Keras, variables "
    "and modules of TensorFlow, writable NumPy arrays, edl.State(...) with arrays of JAX, edl.state(get, "
    "set), lists, tuples or dicts of these"
)
NAMED = 5  # variables in a message
METRICS = "edl/metrics"  # the name of sums that edl itself changes
LEAF = "leaf"  # in the place of an array
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


class State:
    """Values that a loop replaces: arrays of JAX or NumPy, numbers, and containers of these.

    The loop reads and writes the attributes: `state.params = ...`. edl reads the present values, and writes
    those that a new worker receives.

    Args:
        attributes: the first values. Their structure, shapes and types stay.
    """

    def __init__(self, **attributes: Any):
        self.__dict__.update(attributes)


class Arrays:
    """NumPy arrays, which are changed in place."""

    def __init__(self, names: list[str], arrays: list[np.ndarray]):
        self.names, self._arrays = names, arrays

    def arrays(self) -> list[np.ndarray]:
        return [np.array(a, order="C") for a in self._arrays]

    def prepared(self, parts: list[np.ndarray]) -> Any:
        return viewed(parts, self._arrays)

    def put(self, values: Any) -> None:
        for array, value in zip(self._arrays, values, strict=True):
            array[...] = value

    def begin(self) -> None:
        pass

    def settle(self) -> None:
        pass


class Behind:
    """State behind functions (`Functions`).

    Args:
        kinds: whether `set` takes values of the kinds that `get` has returned first, and not NumPy arrays.
    """

    def __init__(self, name: str, functions: Functions, kinds: bool = False):
        self._name, self._functions = name, functions
        tree = functions.get()
        leaves = tensors.with_paths(tree)
        self.names = [name + path for path, leaf in leaves if leaf is not None]
        self._shapes = [_known(n, np.empty_like(_read(n, leaf))) for n, leaf in self._named(leaves)]
        self._back = [_back(leaf) if kinds else np.asarray for _, leaf in self._named(leaves)]
        self._like = tensors.pack(tree, [None if leaf is None else LEAF for _, leaf in leaves])

    def _named(self, leaves: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        return zip(self.names, (leaf for _, leaf in leaves if leaf is not None), strict=True)

    def arrays(self) -> list[np.ndarray]:
        """The present values, as the user's `get` returns them.

        Raises:
            ModelError: structure, shapes or types have changed.
        """
        leaves = tensors.with_paths(self._functions.get())
        if (now := [self._name + path for path, leaf in leaves if leaf is not None]) != self.names:
            unlike = named(sorted({*now} ^ {*self.names}))
            raise ModelError(
                f"the structure of {self._name} has changed: {unlike}; a state keeps its structure"
            )
        arrays = [np.array(_read(name, leaf), order="C") for name, leaf in self._named(leaves)]
        for name, array, before in zip(self.names, arrays, self._shapes, strict=True):
            if (array.shape, array.dtype) != (before.shape, before.dtype):
                raise ModelError(
                    f"{name} is {array.dtype} {list(array.shape)}; edl.join() was given {before.dtype} "
                    f"{list(before.shape)}, and a state keeps its types and shapes: convert it before"
                )
        return arrays

    def prepared(self, parts: list[np.ndarray]) -> Any:
        arrays = iter(viewed(parts, self._shapes))
        values = (back(array) for back, array in zip(self._back, arrays, strict=True))
        return tensors.pack(self._like, [leaf and next(values) for leaf in tensors.flatten(self._like)])

    def put(self, values: Any) -> None:
        self._functions.set(values)

    def begin(self) -> None:
        pass

    def settle(self) -> None:
        pass


class LoopState:
    """All variables of a loop's state.

    Args:
        state: see EXPECTED.

    Raises:
        ModelError: something in it is none of these, or there is no variable at all.
    """

    def __init__(self, state: Any):
        self.sources: list[tuple[Any, int]] = []  # objects with variables, and how many they had
        self._seeds: list[Any] = []  # variables of Keras' random layers, which each step sets anew
        self._seen: dict[int, Any] = {}
        self._groups = [*self._found("state", state)]
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

    def set_seeds(self, words: np.ndarray) -> None:
        """Prepare for the next turn: set the seeds of Keras' random layers to these words, uint32 [2]."""
        for v in self._seeds:
            v.assign(np.broadcast_to(words, v.shape).astype(getattr(v.dtype, "as_numpy_dtype", v.dtype)))
        for group in self._groups:
            group.begin()

    def settle(self) -> None:
        """Refuse further variables from now on: all workers must have the same ones."""
        for group in self._groups:
            group.settle()

    def restore(self, values: Mapping[str, np.ndarray]) -> None:
        """Set the state back to earlier values, by name; variables made since then become absent."""
        now = zip(self.names, self.arrays(), strict=True)
        arrays = [_padded(values.get(name), array) for name, array in now]
        self.take_over(self.prepared([array.reshape(-1).view(np.uint8) for array in arrays]))

    def _found(self, name: str, item: Any) -> Iterator[Group]:
        identity = item
        for adapter in tensors.adapters():
            identity = adapter.identity(identity)
        if self._seen.setdefault(id(identity), identity) is not identity:
            return
        if isinstance(item, Functions):
            yield Behind(name, item)
        elif isinstance(item, State):
            yield Behind(name, Functions(lambda: dict(vars(item)), item.__dict__.update), kinds=True)
        elif isinstance(item, np.ndarray):
            yield Arrays([name], [_known(name, item, writable=True)])
        elif is_seed(item):
            self._seeds.append(item)
        elif (group := tensors.first(lambda adapter: adapter.group(name, item))) is not None:
            yield group
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                yield from self._found(str(key) if name == "state" else f"{name}/{key}", inner)
        elif isinstance(item, Sequence) and not isinstance(item, str | bytes):
            for i, inner in enumerate(item):
                yield from self._found(f"{name}[{i}]", inner)
        elif (variables := getattr(item, "variables", None)) is not None and not callable(variables):
            if not getattr(item, "built", True):
                build = f"call {type(item).__name__}.build(...) before edl.join()"
                raise ModelError(f"{name} is not built, so its variables do not exist yet: {build}")
            self.sources.append((item, len(list(variables))))
            yield from self._found(name, list(variables))
        else:
            raise ModelError(f"{name} is of type {type(item).__name__}: {EXPECTED}")


def named(names: Sequence[str]) -> str:
    """The first few of these variables in words; empty without names."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} others" if len(names) > NAMED else "")


def is_seed(v: Any) -> bool:
    """Whether it is the state of a Keras seed generator."""
    name = str(getattr(v, "path", getattr(v, "name", ""))).partition(":")[0]
    return name.rpartition("/")[2] == "seed_generator_state"


def _known(name: str, array: np.ndarray, writable: bool = False) -> np.ndarray:
    if array.dtype.hasobject:
        raise ModelError(f"{name} is an array of objects; a state holds numbers")
    if writable and not array.flags.writeable:
        raise ModelError(f"{name} is a read-only array; edl writes a received state into it")
    return array


def _read(name: str, leaf: Any) -> np.ndarray:
    """A leaf's values.

    Raises:
        ModelError: it is neither an array nor a number.
    """
    if isinstance(leaf, int | float | complex):
        return np.asarray(leaf)
    try:
        return tensors.array(leaf)
    except TypeError as error:
        raise ModelError(
            f"{name} is of type {type(leaf).__name__}; expected an array or a number. Put an object that "
            "a step changes in its place beside edl.State(...): state=[edl.State(...), object]"
        ) from error


def _back(leaf: Any) -> Callable[[np.ndarray], Any]:
    """Return a function that makes a value of the leaf's kind of an array."""
    if isinstance(leaf, int | float | complex):
        return lambda array: type(leaf)(array.item())
    spec = tensors.spec(leaf)
    assert spec is not None, "it was read"
    return spec.restore


def _padded(value: np.ndarray | None, like: np.ndarray) -> np.ndarray:
    """The value with zeros at its end, up to the size of `like`."""
    found = np.zeros_like(like)
    if value is not None:
        found.reshape(-1)[: value.size] = value.reshape(-1)
    return found
