# SPDX-License-Identifier: Apache-2.0
"""Finds lines of a script that cannot run, before any worker starts.

Code behind a condition, or in a `try`, is not judged: a script may have other ways for other versions.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from edl.errors import ConfigError

_TF1 = "is of TensorFlow 1; port the script to TensorFlow 2 (tensorflow.org/guide/migrate)"
_OTHER = "cannot be used: edl's Horovod is built for TensorFlow and Keras"
_RUNNER = (
    "is not part of edl: its servers run code that any sender gives them; use `edl horovod -np N script.py`"
)
_V1_NAMES = ("Session", "InteractiveSession", "placeholder", "estimator")
_SESSION_NAMES = (
    *_V1_NAMES,
    "ConfigProto",
    "global_variables_initializer",
    "get_default_graph",
    "get_variable",
    "app",
    "layers",
    "contrib",
    "logging",
)
_SWITCHES = ("disable_eager_execution", "disable_v2_behavior")
# Scripts of the first years of TensorFlow 2 choose a GPU by these, and Keras 2 still has them.
ON_KERAS_2 = (
    "tensorflow.compat.v1.Session",
    "tensorflow.compat.v1.keras.backend.set_session",
    "tensorflow.keras.backend.set_session",
)
# A dotted name, and why it cannot be used. Names under it cannot be used either.
REASONS = {
    **{f"tensorflow.{name}": _TF1 for name in _SESSION_NAMES},
    **{f"tensorflow.compat.v1.{name}": _TF1 for name in (*_V1_NAMES, *_SWITCHES)},
    "tensorflow.train.MonitoredTrainingSession": _TF1,
    **dict.fromkeys(ON_KERAS_2, f"{_TF1}, or run it on Keras 2 (--legacy-keras)"),
    "keras.backend.set_session": _TF1,
    "horovod.tensorflow.BroadcastGlobalVariablesHook": _TF1,
    "horovod.tensorflow.Adasum": "needs MPI or NCCL; use op=hvd.Average",
    "horovod.tensorflow.keras.Adasum": "needs MPI or NCCL; use op=hvd.Average",
    "horovod.spark": "starts workers by Spark; edl starts them itself",
    "horovod.ray": "starts workers by Ray; edl starts them itself",
    "horovod.torch": _OTHER,
    "horovod.mxnet": _OTHER,
    "horovod.runner": _RUNNER,
    "horovod.run": _RUNNER,
}


def check(script: Path, legacy: bool = False) -> None:
    """Check a script without running it.

    Args:
        legacy: whether it runs on Keras 2, where a session can be made as plain Python can.

    Raises:
        ConfigError: the script cannot be read or parsed, or has a line that cannot run.
    """
    try:
        tree = ast.parse(script.read_bytes(), str(script))
    except OSError as error:
        raise ConfigError(f"{script}: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{script}: not a Python script: {error}") from error
    aliases: dict[str, str] = {}
    for node in _unconditional(tree):
        for name in _names(node, aliases):
            for known, why in REASONS.items():
                if legacy and known in ON_KERAS_2:
                    continue
                if name == known or name.startswith(f"{known}."):
                    raise ConfigError(f"{script}:{node.lineno}: {known} {why}")


def _names(node: ast.expr | ast.stmt, aliases: dict[str, str]) -> list[str]:
    """The full names that a node uses. Imports are added to `aliases`."""
    match node:
        case ast.Import(names=names):
            for alias in names:
                first = alias.name.partition(".")[0]
                aliases[alias.asname or first] = alias.name if alias.asname else first
            return [alias.name for alias in names]
        case ast.ImportFrom(module=str(module), names=names, level=0):
            aliases |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in names}
            return [f"{module}.{alias.name}" for alias in names]
        case ast.Attribute():
            name = ast.unparse(node)
            first, _, rest = name.partition(".")
            return [f"{aliases[first]}.{rest}"] if first in aliases else []
    return []


def _unconditional(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """The nodes that are not behind a condition, in the order of the text."""
    for node in ast.iter_child_nodes(tree):
        conditional = isinstance(node, (ast.If, ast.IfExp, ast.Try))
        if conditional and not (isinstance(node, ast.If) and "__main__" in ast.dump(node.test)):
            continue
        if isinstance(node, (ast.expr, ast.stmt)):
            yield node
        yield from _unconditional(node)
