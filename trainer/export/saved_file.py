# SPDX-License-Identifier: Apache-2.0
"""A saved model, checked as its users will load it: with nothing but Keras.

A `.keras` file names the classes and functions that it was built of. Those of Keras are there in every
process; others must be imported, or given as `custom_objects`, before the file can be loaded.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from edl.contract.artifacts import CLASSES, METADATA, MODEL
from edl.layers import (  # a file may contain them, and Keras alone does not know them
    Embedding,
    rows_to_be_loaded,
)
from edl.trainer.model import digests

FAILURES = (Exception, SystemExit)  # what the user's code may raise
CONFIG = "config.json"
PLAIN = ".plain."  # prefix of an unfinished file, before the name of the file that it replaces
EMBEDDING = "edl>Embedding"  # as it is registered
PIECE = 1 << 20
MAX_NAMED = 8
FAMILIES = frozenset({"keras", "keras_hub", "keras_cv", "keras_nlp", "builtins"})  # imported by Keras itself
FUNCTIONS = (  # where Keras looks for a function by its name
    keras.activations,
    keras.constraints,
    keras.initializers,
    keras.losses,
    keras.metrics,
    keras.ops,
    keras.regularizers,
)


def save(model: keras.Model, path: Path, classes: Sequence[str] = ()) -> None:
    """Save the model as Keras does, with the numbers of its labels' classes in the file's metadata.

    Layers that have replaced Keras' own (trainer/embedding/replacement.py) are saved as Keras' own.

    Args:
        classes: the names of the labels' classes by number; empty if labels are numbers.

    Raises:
        Exception: any that Keras raises.
    """
    model.save(path)
    if not _replaced(model) and not classes:
        return
    changed = path.with_name(f"{PLAIN}{path.name}")
    try:
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
            for item in old.infolist():
                with old.open(item) as source, new.open(item, "w", force_zip64=True) as target:
                    if item.filename == CONFIG:
                        target.write(json.dumps(_plain(json.load(source))).encode())
                    elif item.filename == METADATA and classes:
                        target.write(json.dumps({**json.load(source), CLASSES: list(classes)}).encode())
                    else:
                        shutil.copyfileobj(source, target, PIECE)
        changed.replace(path)
    finally:
        changed.unlink(missing_ok=True)


def mark_built(model: Any) -> None:
    """Let Keras save and load the weights of a model without call(): only its layers are ever built."""
    if not model.built and model.variables:
        model.built = True


def weights_digest(model: Any) -> str:
    """Equal for two models if files of them hold equal values, bit for bit.

    A layer may write other values than its variables: Keras merges what LoRA has learned into the kernel.
    """

    def values() -> Iterator[np.ndarray]:
        for layer in model._flatten_layers():
            store: dict[str, Any] = {}
            layer.save_own_variables(store)
            for value in store.values():
                array = np.ascontiguousarray(keras.ops.convert_to_numpy(value))
                yield np.frombuffer(f"{array.dtype}{array.shape}".encode(), np.uint8)
                yield array.reshape(-1).view(np.uint8)

    return digests.digest(values()).hex()


def _replaced(model: Any) -> list[Embedding]:
    """The layers that have replaced Keras' own."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, Embedding) and layer.is_plain]


def _plain(config: Any) -> Any:
    """The same model, with Keras' layers in place of edl's layers that hold all of their rows."""
    for node in _nodes(config):
        of = node.get("config")
        if node.get("registered_name") != EMBEDDING or not isinstance(of, dict) or not of.get("float_ids"):
            continue
        if of["vocabulary"] == of["input_dim"]:
            node["module"], node["registered_name"] = "keras.layers", None
            node["config"] = {
                "name": of["name"],
                "trainable": False,
                "dtype": of["dtype"],
                "input_dim": of["input_dim"],
                "output_dim": of["dim"],
                "embeddings_initializer": of["initializer"],
                "mask_zero": of["mask_zero"],
            }
    return config


def note(path: Path) -> str:
    """What a user must know to load the file; empty if `keras.models.load_model(path)` is enough."""
    found, needs = config(path), []
    if names := custom_objects(found):
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        ours = {name: module for name in names if (module := _module_of_ours(name))}
        how = [f"import {', '.join(sorted({*ours.values()}))}"] if ours else []
        if len(ours) < len(names):
            them = ", ".join([name for name in names if name not in ours][:MAX_NAMED]) if ours else "them"
            how.append(
                f"import the module that registers {them}, or pass custom_objects to keras.models.load_model"
            )
        needs.append(f"with custom objects ({', '.join(names[:MAX_NAMED])}{more}): {'; '.join(how)}")
    if has_lambda(found):
        needs.append("with safe_mode=False (it holds Python code of a Lambda layer)")
    return f"{path.name} can be loaded only {' and '.join(needs)}" if needs else ""


def _module_of_ours(name: str) -> str:
    """The module of edl that registers this name with Keras; empty for names of the user."""
    module = getattr(keras.saving.get_registered_object(name), "__module__", "")
    return module if module.partition(".")[0] == "edl" and not module.startswith("edl.zoo") else ""


def by_its_code(why: str, name: str = MODEL) -> str:
    """What a user must know to load a file that Keras cannot load, or not as it was saved."""
    return f"{why}; build the model by its own code, and take the weights with model.load_weights({name!r})"


def load(path: Path, known: Mapping[str, Any], is_own: bool = True) -> Any:
    """The model in the file, as the note says that it can be loaded.

    Args:
        known: the names of the module that it was built in.
        is_own: this process, or the worker that has started it, has written the file. Code in any other file
            (of a Lambda layer) is not run.

    Raises:
        what Keras raises: it cannot be loaded.
    """
    found = config(path)
    custom = {name: known[name] for name in custom_objects(found) if name in known}
    with rows_to_be_loaded():  # in the process that has the others on servers, too
        return keras.models.load_model(
            path, custom_objects=custom, safe_mode=not (is_own and has_lambda(found))
        )


def config(path: Path) -> Any:
    """The configuration in the file; None if it is invalid, which loading will show."""
    try:
        with zipfile.ZipFile(path) as archive:
            return json.loads(archive.read(CONFIG))
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return None


def custom_objects(config: Any) -> list[str]:
    """The names of the classes and functions in a saved configuration that are not Keras' own."""
    found = set()
    for node in _nodes(config):
        name = node.get("registered_name")
        if name == "function":  # one that is not registered, or Keras' own
            name = str(node.get("config"))
            own = not any(hasattr(module, name) for module in FUNCTIONS)
        else:
            own = str(node.get("module")).partition(".")[0] not in FAMILIES
        if isinstance(name, str) and own:
            found.add(name)
    return sorted(found)


def has_lambda(config: Any) -> bool:
    """Whether the configuration holds Python code, which Keras loads only when asked to."""
    return any(node.get("class_name") == "__lambda__" for node in _nodes(config))


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        for part in value.values():
            yield from _nodes(part)
    elif isinstance(value, list):
        for part in value:
            yield from _nodes(part)
