# SPDX-License-Identifier: Apache-2.0
"""PyTorch in own loops: modules, optimizers, schedulers, and the gradients in a module's parameters.

An optimizer makes its slots in its first step. So a variable may be absent: a new worker's optimizer has none
and receives those of the others. One that is set back to the state before its first step loses them again.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from edl.errors import ModelError
from edl.trainer.model.adapter import Adapter, Children, Group, Spec, viewed

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value
NUMBER = int | float  # bool is one, too
Path: TypeAlias = tuple[Any, ...]
ELSEWHERE = "FullyShardedDataParallel", "FSDPModule", "DistributedDataParallel", "DataParallel"


def host(tensor: torch.Tensor) -> np.ndarray:
    """The values in host memory, without a copy if they are there."""
    found = tensor.detach().cpu().contiguous()
    try:
        return found.numpy()
    except TypeError:  # NumPy has no such type: bfloat16, and those of 8 bits
        import ml_dtypes

        dtype = np.dtype(getattr(ml_dtypes, str(found.dtype).removeprefix("torch.")))
        return found.view(BITS[found.itemsize]).numpy().view(dtype)


def refuse(name: str, tensor: Any) -> None:
    """Refuse a tensor whose values this process cannot copy.

    Raises:
        ModelError: names it.
    """
    kind = type(tensor).__name__
    if kind == "DTensor":
        why = "a DTensor, a part of a sharded model; edl holds the whole model in each worker"
    elif kind.startswith("Uninitialized"):
        why = "not made yet; call the module once with a batch before edl.join()"
    elif tensor.is_meta:
        why = "on the device 'meta', without values"
    elif tensor.layout != torch.strided or tensor.is_quantized:
        why = f"a tensor of layout {tensor.layout} and type {tensor.dtype}; only dense ones can be copied"
    else:
        return
    raise ModelError(f"{name} is {why}")


@dataclass(frozen=True)
class Kind:
    """The type of a variable.

    Args:
        make: returns an array of this type as a value, in the place of the present one if that is a tensor.
    """

    dtype: np.dtype
    shape: tuple[int, ...]
    make: Callable[[np.ndarray, Any], Any] = field(compare=False)

    @staticmethod
    def of(leaf: Any) -> Kind | None:
        """The type of a leaf; None if it is no variable but a text, a function or None."""
        if isinstance(leaf, torch.Tensor):
            dtype, device = leaf.dtype, leaf.device
            return Kind(
                _numpy(dtype), tuple(leaf.shape), lambda array, now: _into(now, _tensor(array, dtype), device)
            )
        if isinstance(leaf, NUMBER):  # an integer may become a fraction, as a learning rate does
            kind = type(leaf)
            return Kind(np.dtype(np.float64), (), lambda array, now: _number(kind, float(array)))
        if isinstance(leaf, np.ndarray | np.generic):
            return Kind(leaf.dtype, leaf.shape, lambda array, now: array)
        return None


class Tree:
    """Tensors and numbers in nested dicts, lists and tuples; some may be absent.

    Args:
        name: of the object, for the names of its variables.
        get: returns the tree.
        set: takes a tree with other values, whose tensors and containers were changed in place if possible.
    """

    def __init__(self, name: str, get: Callable[[], Any], set: Callable[[Any], object] = lambda tree: None):
        self._name, self._get, self._set = name, get, set
        self._kinds: dict[Path, Kind] = {}
        self._settled = False
        self._look()

    @property
    def names(self) -> list[str]:
        self._look()
        return [*map(self._named, self._kinds), f"{self._name}/present"]

    def arrays(self) -> list[np.ndarray]:
        found = self._look()
        present = np.array([path in found for path in self._kinds], np.uint8)
        values = [
            _array(found[path]) if path in found else np.zeros(kind.shape, kind.dtype)
            for path, kind in self._kinds.items()
        ]
        return [*values, present]

    def prepared(self, parts: list[np.ndarray]) -> Any:
        arrays = [np.zeros(kind.shape, kind.dtype) for kind in self._kinds.values()]
        return [*viewed(parts[:-1], arrays), parts[-1]]

    def put(self, values: Any) -> None:
        *arrays, present = values
        tree = self._get()
        for (path, kind), array, is_there in zip(self._kinds.items(), arrays, present, strict=True):
            tree = _with(tree, path, partial(kind.make, array) if is_there else None)
        self._set(tree)

    def begin(self) -> None:
        pass

    def settle(self) -> None:
        self._settled = True

    def _look(self) -> dict[Path, Any]:
        """Return the values that there are now, by path, and learn new variables.

        Raises:
            ModelError: a variable has changed its type, or is new after the trial.
        """
        found: dict[Path, Any] = {}
        for path, leaf in _leaves(self._get()):
            if (kind := Kind.of(leaf)) is None:
                continue
            found[path] = leaf
            if (known := self._kinds.get(path)) is None:
                if isinstance(leaf, torch.Tensor):
                    refuse(self._named(path), leaf)
                if self._settled:
                    raise ModelError(
                        f"{self._named(path)} was made after the trial steps, and all workers must have the "
                        "same variables; let an optimizer step with zero gradients before edl.join()"
                    )
                self._kinds[path] = kind
            elif known != kind:
                raise ModelError(
                    f"{self._named(path)} is {kind.dtype} {list(kind.shape)}; it was {known.dtype} "
                    f"{list(known.shape)} before, and a state keeps its types and shapes"
                )
        return found

    def _named(self, path: Path) -> str:
        return self._name + "".join(f".{key}" for key in path)


class Module(Tree):
    """The parameters and buffers of a module.

    Buffers that a forward pass changes, as BatchNorm does, are averaged with the gradients (`Torch.taken`).
    """

    def __init__(self, name: str, module: torch.nn.Module, before: dict[tuple[int, str], torch.Tensor]):
        self._module, self._before = module, before
        if any(cls.__name__ in ELSEWHERE for part in module.modules() for cls in type(part).__mro__):
            raise ModelError(
                f"{name} is wrapped or sharded by {type(module).__name__}; pass the module itself: edl "
                "averages the gradients, and each worker holds the whole model"
            )
        get = lambda: _distinct(module.state_dict(keep_vars=True))  # noqa: E731
        for key, value in get().items():
            if not isinstance(value, torch.Tensor):
                kind = type(value).__name__
                raise ModelError(f"{name}.{key} is of type {kind}; get_extra_state() must return a tensor")
            refuse(f"{name}.{key}", value)
        super().__init__(name, get)

    def begin(self) -> None:
        """Keep the buffers, which the turn may change."""
        for part in self._module.modules():
            for key, buffer in part._buffers.items():
                if buffer is not None:
                    self._before[id(part), key] = buffer.detach().clone()


class Torch(Adapter):
    """PyTorch."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], torch.Tensor] = {}  # buffers at the beginning of the turn
        self._moving: dict[int, list[tuple[torch.nn.Module, str]]] = {}  # those that turns change, by module

    def array(self, value: Any) -> np.ndarray | None:
        if not isinstance(value, torch.Tensor):
            return None
        return host(value.to_dense() if value.layout != torch.strided else value)

    def spec(self, value: Any) -> Spec | None:
        if not isinstance(value, torch.Tensor):
            return None
        dtype, device = value.dtype, value.device
        if value.is_meta or type(value).__name__ == "DTensor":
            refuse("a gradient", value)
        return Spec(
            tuple(value.shape),
            str(dtype).removeprefix("torch."),
            dtype.is_floating_point,
            lambda mean: torch.from_numpy(mean).to(device, dtype),
        )

    def group(self, name: str, item: Any) -> Group | None:
        if any(cls.__module__.partition(".")[0] == "keras" for cls in type(item).__mro__):
            return None  # on this backend a layer of Keras is a module, too
        if isinstance(item, torch.nn.Module):
            return Module(name, item, self._before)
        if isinstance(item, torch.Tensor):
            return Tree(name, lambda: {"value": item})
        if isinstance(item, torch.Generator):
            return Tree(name, lambda: {"state": item.get_state()}, lambda tree: item.set_state(tree["state"]))
        if isinstance(item, torch.optim.Optimizer):
            return Tree(name, lambda: _of_optimizer(item), lambda tree: _set_optimizer(item, tree))
        if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
            return None
        return Tree(name, lambda: _copied(item.state_dict()), item.load_state_dict)

    def records(self, data: Any) -> Callable[[np.ndarray], Any] | None:
        ours = torch.utils.data.Dataset | torch.utils.data.DataLoader | torch.Tensor
        leaves = (
            data if isinstance(data, list | tuple) else data.values() if isinstance(data, dict) else [data]
        )
        formatted = (getattr(data, "format", None) or {}) if hasattr(data, "with_format") else {}
        if not any(isinstance(leaf, ours) for leaf in leaves) and formatted.get("type") != "torch":
            return None
        kinds = "biufc"  # text stays as it is
        return lambda array: (
            torch.from_numpy(array) if isinstance(array, np.ndarray) and array.dtype.kind in kinds else array
        )

    def taken(self, module: Any) -> Children | None:
        """Return the gradients of the parameters, and the buffers that the forward pass has changed."""
        if not isinstance(module, torch.nn.Module):
            return None
        parameters = [*module.named_parameters()]
        gradients = [(name, p.grad) for name, p in parameters]
        for _, p in parameters:
            p.grad = None
        moving = self._moved(module)
        changed = []
        for part, key in moving:
            now, before = getattr(part, key), self._before[id(part), key]
            # An average is averaged, and a counter's change is.
            changed.append(
                (key, now.detach().clone() if now.is_floating_point() else (now - before).double())
            )
            now.copy_(before)

        def put(means: Sequence[Any]) -> torch.nn.Module:
            for (_, p), mean in zip(parameters, means[: len(parameters)], strict=True):
                p.grad = mean
            for (part, key), mean in zip(moving, means[len(parameters) :], strict=True):
                buffer = getattr(part, key)
                buffer.copy_(mean if buffer.is_floating_point() else buffer + mean.round().to(buffer.dtype))
            return module

        return [*gradients, *changed], put

    def _moved(self, module: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
        """The buffers of the state that the first turn has changed: the same in all steps and workers."""
        if id(module) not in self._moving:
            self._moving[id(module)] = [
                (part, key)
                for part in module.modules()
                for key, buffer in part._buffers.items()
                if (before := self._before.get((id(part), key))) is not None
                and not torch.equal(before, buffer)
            ]
        return self._moving[id(module)]


def _of_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The slots of an optimizer by the number of their parameter, and what its schedules change."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {
        "state": {i: optimizer.state[p] for i, p in enumerate(parameters) if p in optimizer.state},
        "param_groups": [
            {key: value for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ],
    }


def _set_optimizer(optimizer: torch.optim.Optimizer, tree: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for i, p in enumerate(parameters):
        if slots := tree["state"].get(i):
            optimizer.state[p] = slots
        else:
            optimizer.state.pop(p, None)
    for group, values in zip(optimizer.param_groups, tree["param_groups"], strict=True):
        group.update(values)


def _distinct(tensors: dict[str, Any]) -> dict[str, Any]:
    """Each tensor once: parameters may be tied."""
    found: dict[int, str] = {}
    return {key: value for key, value in tensors.items() if found.setdefault(id(value), key) == key}


def _leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(node, dict | list | tuple):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(value, (*path, key))
    else:
        yield path, node


def _copied(node: Any) -> Any:
    """The containers anew, with the same leaves."""
    if isinstance(node, dict):
        found = copy.copy(node)
        found.update({key: _copied(value) for key, value in node.items()})
        return found
    return type(node)(map(_copied, node)) if type(node) in (list, tuple) else node


def _with(node: Any, path: Path, make: Callable[[Any], Any] | None) -> Any:
    """The tree with another value at `path`; without one if `make` is None.

    Args:
        make: takes the present value, or None.
    """
    if not path:
        return make(node) if make is not None else None
    key, rest = path[0], path[1:]
    if isinstance(node, tuple):
        return tuple(_with(each, rest, make) if i == key else each for i, each in enumerate(node))
    if isinstance(node, list):
        node[key] = _with(node[key], rest, make)
        return node
    if node is None:
        if make is None:
            return None
        node = {}
    if (value := _with(node.get(key), rest, make)) is None:
        node.pop(key, None)
    else:
        node[key] = value
    return node


def _array(leaf: Any) -> np.ndarray:
    """A copy of a leaf's values."""
    values = host(leaf) if isinstance(leaf, torch.Tensor) else leaf
    return np.array(values, np.float64 if isinstance(leaf, NUMBER) else None, order="C")


def _numpy(dtype: torch.dtype) -> np.dtype:
    return host(torch.empty(0, dtype=dtype)).dtype


def _tensor(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """An array that `host` has made as a tensor again, with memory of its own."""
    if array.dtype.kind == "V":
        array = array.view("u1" if array.itemsize == 1 else f"i{array.itemsize}")
    return torch.from_numpy(np.array(array)).view(dtype)


def _into(now: Any, value: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not isinstance(now, torch.Tensor):
        return value.to(device)
    with torch.no_grad():
        return now.copy_(value)


def _number(kind: type, value: float) -> Any:
    """A number of this type; a fraction if it is one."""
    return kind(value) if kind is bool or (kind is int and value.is_integer()) else value


ADAPTER = Torch()
