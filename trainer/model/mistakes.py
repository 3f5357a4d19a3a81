# SPDX-License-Identifier: Apache-2.0
"""Common mistakes in a model and its data, found behind the errors that libraries raise about them.

A mistake is looked for only after an error: what Keras accepts is never refused here. Libraries raise these
errors deep inside a step, in no line of the user's code, so the line is found by what the mistake is about:
the `compile` of model(), or the last `return` of data() or feed().
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from edl.errors import ModelError
from edl.formatting import how_many
from edl.trainer.model.model_support import of_keras
from edl.trainer.model.user_model import UserModel
from edl.trainer.records.batches import Batch
from edl.trainer.runtime.error_report import Place, format_error

ENCODE = (
    "encode it with a layer (keras.layers.StringLookup, keras.layers.TextVectorization; docs/data.md#files), "
    "or leave it out (features=...)"
)
MAX_SHOWN = 5  # names in a message


class Mistake(ModelError):
    """A common mistake, with the line of the user's code that it is about.

    Args:
        about: the function of the contract that has it: model, data or feed.
        place: its line; None if it is not known.
        cause: the library's error, in one line.
        also: further mistakes that were found with it.
    """

    def __init__(
        self, why: str, about: str, place: Place | None, cause: str = "", also: Sequence[Mistake] = ()
    ):
        text = f"{why}: {cause}" if cause else why
        super().__init__(f"{text} ({place})" if place is not None else text)
        self.why, self.about, self.place, self.cause, self.also = why, about, place, cause, also


def behind(
    error: BaseException, module: UserModel, model: keras.Model, batch: Batch | None, batch_size: int
) -> Mistake | None:
    """The mistake behind an error of the model's first step; None if no common one is found.

    Args:
        batch: the records of the step.
        batch_size: training.batchSize.
    """
    records = "feed" if module.feed else "data"
    found: list[tuple[str, str]] = []
    if "Could not interpret" in str(error):  # a misspelt loss, metric or optimizer
        return Mistake(f"{module.name}: {format_error(error)}", "model", place_of(module, "model"))
    if batch is not None:
        source = "feed(records)" if module.feed else f"the reader of {module.source('train')}"
        if batch.y is None and not _has_own_loss(model):
            why = f"{source} gives no labels, and the model's loss is computed without them"
            if not module.feed:
                why += (
                    ": name their column (label=... of edl.csv, edl.parquet and edl.dataset, or data.label)"
                )
            found = [(why, records)]
        else:
            of_records = _input_mistake(model, batch.x), _weights_mistake(batch.y, batch.weights)
            pair = _label_mistake(model, batch.y, records)
            found = [*((why, records) for why in of_records if why), *([pair] if pair else [])]
    if not found and re.search(rf"\b{batch_size}\b", str(error)):
        why = (
            f"training.batchSize is {batch_size}, and a worker gets a part of each batch, with any "
            "number of records: the model must take the size from the batch (None, -1, ops.shape)"
        )
        found = [(why, "model")]
    if not found:
        return None
    also = [Mistake(f"{module.name}: {why}", about, place_of(module, about)) for why, about in found[1:]]
    why, about = found[0]
    return Mistake(f"{module.name}: {why}", about, place_of(module, about), format_error(error), also)


def refuse_strategy(module: UserModel, model: keras.Model) -> None:
    """Refuse a model whose variables, or whose optimizer, belong to a strategy of TensorFlow.

    Raises:
        Mistake: the model was built or compiled in a strategy's scope; the text names its line.
    """
    optimizer = getattr(model, "optimizer", None)
    found = getattr(model, "_distribute_strategy", None), getattr(optimizer, "_distribution_strategy", None)
    for strategy in found:
        if strategy is None or strategy is tf.distribute.get_strategy():  # the default, which is none
            continue
        raise Mistake(
            f"{module.name}: model() works in the scope() of {type(strategy).__name__}, and edl makes the "
            "ring of workers itself: delete the strategy and its scope (docs/keras3.md)",
            "model",
            place_of(module, "model", "scope"),
        )


def not_finite(module: UserModel, batch: Batch) -> Mistake:
    """The mistake behind a loss that is not finite: a value of the records, if one of them is not finite."""
    if value := batch.not_finite():
        about = "feed" if module.feed else "data"
        return Mistake(f"{module.name}: {value}", about, place_of(module, about))
    return Mistake(
        f"{module.name}: the loss of {len(batch)} records is not finite, though all their values are: look "
        "for a logarithm or a division in the loss and the model, and for a learning rate that is too large",
        "model",
        place_of(module, "model"),
    )


def _has_own_loss(model: keras.Model) -> bool:
    return (
        type(model).train_step is not keras.Model.train_step
        or type(model).compute_loss is not keras.Model.compute_loss
        or model.loss is None
    )


# --- features and the model's inputs


def _input_mistake(model: keras.Model, x: Any) -> str:
    """How the features differ from the inputs of a functional model; empty if they fit, or cannot be told."""
    inputs = {tensor.name: tensor for tensor in _flat(getattr(model, "inputs", None))}
    if not inputs:
        return ""
    if isinstance(x, dict):
        if not isinstance(getattr(model, "_inputs_struct", None), dict) and len(inputs) == 1 < len(x):
            text = [name for name, array in x.items() if _is_text(array)]
            why = f"the features are a dict of {_listed(x)}, and the model has one input"
            if text:
                return f"{why}: {_listed(text)} is text, so the columns are no matrix; {ENCODE}"
            return f"{why}: give one array, or make a keras.Input for each"
        if missing := [name for name in inputs if name not in x]:
            if len(inputs) == len(x):  # Keras takes them in order
                return (
                    f"the features are a dict of {_listed(x)}, and the model's inputs are {_listed(inputs)}"
                )
            return f"the features are a dict of {_listed(x)}, and the model's input {missing[0]!r} is missing"
        pairs = [(f"features[{name!r}]", x[name], tensor) for name, tensor in inputs.items()]
    elif isinstance(x, list | tuple):
        if len(x) != len(inputs):
            return f"the features are {len(x)} arrays, and the model has {how_many(len(inputs), 'input')}"
        pairs = [(f"features[{n}]", x[n], tensor) for n, tensor in enumerate(inputs.values())]
    else:
        if len(inputs) > 1:
            return f"the features are one array, and the model has the inputs {_listed(inputs)}"
        pairs = [("features", x, next(iter(inputs.values())))]
    return next((why for pair in pairs if (why := _array_mistake(*pair))), "")


def _array_mistake(name: str, array: Any, tensor: Any) -> str:
    if not hasattr(array, "shape"):
        return f"{name} is a {type(array).__name__}, and the model's input {tensor.name!r} is one array"
    wants_text = tensor.dtype == "string"
    if _is_text(array) != wants_text:
        if wants_text:
            return f"{name} is {array.dtype}, and the model's input {tensor.name!r} takes text"
        return f"{name} is text, and the model's input {tensor.name!r} takes {tensor.dtype}: {ENCODE}"
    ours, theirs = list(array.shape[1:]), list(tensor.shape[1:])
    alike = [a for a in ours if a != 1], [b for b in theirs if b != 1]  # Keras adds and removes axes of 1
    if len(alike[0]) != len(alike[1]) or any(
        None not in (a, b) and a != b for a, b in zip(*alike, strict=True)
    ):
        return (
            f"a record of {name} has shape {_shape(ours)}, and the model's input {tensor.name!r} takes "
            f"{_shape(theirs)}"
        )
    return ""


# --- weights, labels, the model's output and its loss


def _weights_mistake(y: Any, weights: Any) -> str:
    """Say how weights differ from labels that are a dict by output; empty if they do not."""
    if not isinstance(y, dict) or weights is None:
        return ""
    if not isinstance(weights, dict):
        return f"the labels are a dict of {_listed(y)}, and the weights are not: give a dict of weights, too"
    missing = [name for name in y if name not in weights]
    if not missing:
        return ""
    return (
        f"the weights are a dict of {_listed(weights)}, and the output {missing[0]!r} is missing: add "
        f"{missing[0]!r}: None if all its records count alike"
    )


def _label_mistake(model: keras.Model, y: Any, records: str) -> tuple[str, str] | None:
    """How labels differ from the output of a model with one; with the function that has the mistake."""
    outputs = _flat(getattr(model, "outputs", None))
    if len(outputs) != 1 or not hasattr(y, "shape") or isinstance(model.loss, dict | list | tuple):
        return None
    if not (isinstance(model.loss, str) or of_keras(model.loss)):
        return None
    if _is_text(y):
        return f"the labels are text, such as {_first(y)!r}: make numbers of them (0, 1, 2, ...)", records
    loss, shape, out = _loss_name(model.loss), list(y.shape[1:]), list(outputs[0].shape[1:])
    classes = out[-1] if out else None
    if loss == "sparsecategoricalcrossentropy":
        if len(shape) == len(out) and shape[-1:] == [classes] and classes != 1:
            return (
                f"a label has {classes} values, one for each class, and the loss takes the number of the "
                'class: compile with loss="categorical_crossentropy"'
            ), "model"
        values = np.asarray(y)
        if classes and values.size and not (values.min() >= 0 and values.max() < classes):
            return (
                f"the labels go from {values.min():g} to {values.max():g}, and the model's output has "
                f"{how_many(classes, 'value')}: classes are numbered 0 to {classes - 1}"
            ), "model"
    elif loss == "categoricalcrossentropy" and (shape in ([], [1])) and classes != 1:
        return (
            f"a label is the number of a class, and the loss takes {classes} values, one for each class: "
            'compile with loss="sparse_categorical_crossentropy"'
        ), "model"
    elif None not in out and [n for n in shape if n != 1] != [n for n in out if n != 1]:
        return (
            f"a label has shape {_shape(shape)}, and the model's output {_shape(out)}: with this loss "
            "they must be alike"
        ), "model"
    return None


def _loss_name(loss: Any) -> str:
    """The name of a loss of Keras, however it is given: categoricalcrossentropy."""
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)
    return name.replace("_", "").lower()


# --- lines of the user's code


def place_of(module: UserModel, about: str, method: str = "compile") -> Place | None:
    """The line of a function of the contract that a mistake is about; None if there is no such line.

    Args:
        about: model, data or feed.
        method: of model, the line that calls this method.
    """
    function: Callable[..., Any] | None = {
        "model": module.model,
        "feed": module.feed,
        "data": getattr(module.data, "function", module.data),
    }[about]
    code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
    if code is None:
        return None
    place = Place(code.co_filename, code.co_firstlineno, code.co_name)
    try:
        with open(code.co_filename, encoding="utf-8-sig") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return place
    lines = [
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name == code.co_name
        and node.lineno <= code.co_firstlineno + len(node.decorator_list)
        and node.end_lineno is not None
        and code.co_firstlineno <= node.end_lineno
        for line in _lines(node, about, method)
    ]
    return place._replace(line=max(lines)) if lines else place


def _lines(function: ast.FunctionDef, about: str, method: str) -> Iterator[int]:
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(attr=called)) if about == "model" and called == method:
                yield node.lineno
            case ast.Return() if about != "model":
                yield node.lineno


# --- words


def _flat(tensors: Any) -> list[Any]:
    return [tensor for tensor in keras.tree.flatten(tensors) if hasattr(tensor, "shape")] if tensors else []


def _is_text(array: Any) -> bool:
    return str(getattr(array, "dtype", "")) in ("<dtype: 'string'>", "string") or (
        isinstance(array, np.ndarray) and array.dtype.kind in "USO"
    )


def _first(array: Any) -> str:
    value = np.asarray(array).reshape(-1)[0]
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _listed(names: Any) -> str:
    shown = [repr(name) for name in names]
    more = f" and {len(shown) - MAX_SHOWN} others" if len(shown) > MAX_SHOWN else ""
    return ", ".join(shown[:MAX_SHOWN]) + more


def _shape(shape: list[int | None]) -> str:
    return f"({', '.join('any' if n is None else str(n) for n in shape)}{',' if len(shape) == 1 else ''})"
