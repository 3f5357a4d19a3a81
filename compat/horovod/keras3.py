# SPDX-License-Identifier: Apache-2.0
"""Names of Keras 2 that Horovod and scripts for it use, for Keras 3.

`install` adds them.

    variable.ref()                            hvd.DistributedGradientTape keys gradients by it
    optimizer.variables()                     is an attribute in Keras 3, and stays one
    optimizer.lr                              is `learning_rate`
    keras.backend.get_value, set_value        fail on variables of Keras 3
    compile(experimental_run_tf_function=)    is ignored: Keras 3 has one way to run a step
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.core import Variable
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers.trainer import Trainer

KERAS = Path(keras.__file__).parent
# In errors about arguments of Keras 2, and about models that are saved in a folder.
REMOVED = re.compile(
    r"not recognized|[Uu]nrecognized keyword|unexpected keyword argument|Invalid filepath extension"
)
_reported: set[str] = set()


class CallableList(list[Any]):
    """A list that returns itself when it is called."""

    def __call__(self) -> CallableList:
        return self


def install(refuse_compile: Callable[[Any, Any], None]) -> None:
    """Add the names to Keras' classes and modules.

    Args:
        refuse_compile: called with a model and its optimizer before they are compiled; raises if the two
            cannot be trained together.
    """
    Variable.ref = lambda variable: variable._value.ref()
    of_optimizer = BaseOptimizer.variables.fget
    if getattr(of_optimizer, "for_horovod", False):
        return

    def variables(optimizer: Any) -> CallableList:
        return CallableList(of_optimizer(optimizer))

    variables.for_horovod = True  # type: ignore[attr-defined]
    BaseOptimizer.variables = property(variables)
    BaseOptimizer.lr = property(_learning_rate, _set_learning_rate)
    for backend in (keras.backend, tf.keras.backend):
        backend.set_value, backend.get_value = set_value, get_value
    compile_model = Trainer.compile

    @functools.wraps(compile_model)
    def compile(model: Any, *args: Any, **options: Any) -> None:
        if options.pop("experimental_run_tf_function", None) is not None:
            _report("compile(experimental_run_tf_function=) is ignored")
        refuse_compile(model, args[0] if args else options.get("optimizer"))
        compile_model(model, *args, **options)

    Trainer.compile = compile


def keras2_advice(error: BaseException) -> str:
    """Advise to run the script on Keras 2 if it uses what Keras 3 does not have; empty for other errors."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    in_keras = last is not None and Path(last.tb_frame.f_code.co_filename).is_relative_to(KERAS)
    missing = ""
    if isinstance(error, AttributeError):
        missing = getattr(error.obj, "__name__", "") if isinstance(error.obj, ModuleType) else ""
        missing = missing or type(error.obj).__module__
    elif isinstance(error, ImportError):
        missing = (error.name or "").removeprefix("tensorflow.")
    if missing.partition(".")[0] == "keras" or (in_keras and REMOVED.search(str(error))):
        return (
            "if the script is written for Keras 2, run it with --legacy-keras (in a cluster, "
            "TF_USE_LEGACY_KERAS=1 in worker.env)"
        )
    return ""


def set_value(variable: Any, value: Any) -> None:
    """Assign `value` to a variable."""
    variable.assign(value)


def get_value(variable: Any) -> Any:
    """The value of a variable as a NumPy array."""
    return keras.ops.convert_to_numpy(variable)


def _learning_rate(optimizer: Any) -> Any:
    _report("optimizer.lr is optimizer.learning_rate")
    return optimizer._learning_rate


def _set_learning_rate(optimizer: Any, value: Any) -> None:
    optimizer.learning_rate = value


def _report(text: str) -> None:
    if text not in _reported:
        _reported.add(text)
        print(f"edl horovod: on Keras 3, {text}", file=sys.stderr)
