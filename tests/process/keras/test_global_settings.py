# SPDX-License-Identifier: Apache-2.0
"""Global settings of TensorFlow and Keras that a module may make: a ring trains as Keras with them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import traceback

import pytest

pytestmark = pytest.mark.process

SECONDS, SETTING_SECONDS = 600, 60
CONFIG, DEBUGGING = "tf.config", "tf.debugging"
CPUS = f"{CONFIG}.list_physical_devices('CPU')"
SETTINGS = {
    "determinism": f"{CONFIG}.experimental.enable_op_determinism()",
    "threads": f"{CONFIG}.threading.set_intra_op_parallelism_threads(1); "
    f"{CONFIG}.threading.set_inter_op_parallelism_threads(1)",
    "placement": f"{CONFIG}.set_soft_device_placement(False)",
    "XLA": f"{CONFIG}.optimizer.set_jit('autoclustering')",
    "options": f"{CONFIG}.optimizer.set_experimental_options("
    "{'layout_optimizer': False, 'constant_folding': False, 'auto_mixed_precision': False})",
    "eager functions": f"{CONFIG}.run_functions_eagerly(True)",
    "numerics": f"{DEBUGGING}.enable_check_numerics()",
    "dump": f"{DEBUGGING}.experimental.enable_dump_debug_info(tempfile.mkdtemp())",
    "logical devices": f"{CONFIG}.set_logical_device_configuration("
    f"{CPUS}[0], [{CONFIG}.LogicalDeviceConfiguration()] * 2)",
    "devices": f"{CONFIG}.set_visible_devices([], 'GPU'); {CONFIG}.set_visible_devices({CPUS})",
    "TF32": f"{CONFIG}.experimental.enable_tensor_float_32_execution(False)",
    "eager data": "tf.data.experimental.enable_debug_mode()",
    "NumPy's types": "tf.experimental.numpy.experimental_enable_numpy_behavior()",
    "seeds": "tf.random.set_seed(7); keras.utils.set_random_seed(7)",
    "Keras": "keras.config.set_epsilon(1e-3); keras.config.set_image_data_format('channels_first'); "
    "keras.config.enable_unsafe_deserialization(); keras.config.disable_traceback_filtering()",
    "mixed_bfloat16": "keras.config.set_dtype_policy('mixed_bfloat16')",
    "mixed_float16": "keras.config.set_dtype_policy('mixed_float16')",
    "floatx": "keras.config.set_floatx('float16')",
    "float64": "keras.config.set_dtype_policy('float64')",
    "bfloat16": "keras.config.set_dtype_policy('bfloat16')",
}
REFUSED = {
    "floatx": "variable 'dense/kernel' is float16; only float32 variables can be trained",
    "float64": "variable 'dense/kernel' is float64; only float32 variables can be trained",
    "bfloat16": "variable 'dense/kernel' is bfloat16; only float32 variables can be trained",
}
TOLERANCES = {"mixed_bfloat16": 2.0**-7, "mixed_float16": 2.0**-10}  # of sums in these types
# The ranks of this test wait for each other on TensorFlow's threads, and this setting leaves one.
RING_OF_ONE = {"threads"}


def train_as_keras(name: str) -> None:
    """Compare two steps of a ring with Keras' own.

    Raises:
        AssertionError: the weights differ.
    """
    import numpy as np

    from tests.process.keras.models import X, Y, dense, plain
    from tests.process.keras.rings import Case, Meeting, learner_of, parts_of, ring_step

    case, meeting = Case(dense, plain), Meeting()
    learner, reference = learner_of(case, meeting), case.build()
    reference.set_weights(learner.model.get_weights())
    before = reference.get_weights()
    for step, (start, stop) in enumerate(((0, 12), (12, 24))):
        ring_step(learner, meeting, parts_of(case, 1 if name in RING_OF_ONE else 2, start, stop), step)
        reference.train_on_batch(X[start:stop], Y[start:stop])
    for old, ours, theirs in zip(before, learner.model.get_weights(), reference.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=TOLERANCES.get(name, 1e-6))
        assert not np.array_equal(old, ours)


def in_a_process_of_its_own(name: str) -> str:
    """Train under a setting, in a fork of this process. Returns the error, or ""."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        os.close(read)
        os.dup2(2, 1)
        error = ""
        try:
            import tempfile

            import keras
            import tensorflow as tf

            exec(SETTINGS[name], {"tf": tf, "keras": keras, "tempfile": tempfile})
            train_as_keras(name)
        except BaseException:
            error = traceback.format_exc()
        finally:
            os.write(write, f"{error[-4000:]}.".encode())
            os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], SETTING_SECONDS)
    said = os.read(read, 60_000).decode() if ready else ""
    os.close(read)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return said.removesuffix(".") if said else "its process ended, or hangs"


@pytest.fixture(scope="module")
def errors() -> dict[str, str]:
    command = [sys.executable, "-m", __name__]
    told = subprocess.run(command, stdout=subprocess.PIPE, timeout=SECONDS, check=True)
    found: dict[str, str] = json.loads(told.stdout)
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_global_setting_trains_as_in_keras_or_is_refused_by_name(errors: dict[str, str], name: str) -> None:
    assert REFUSED.get(name, "") in errors[name] and bool(errors[name]) == (name in REFUSED), errors[name]


if __name__ == "__main__":
    import edl.trainer.step.learner  # noqa: F401  imports TensorFlow, and starts no thread of it

    found = {}
    for name in sys.argv[1:] or SETTINGS:
        found[name] = in_a_process_of_its_own(name)
        print(f"{name}: {found[name][-300:] or 'as in Keras'}", file=sys.stderr, flush=True)
    print(json.dumps(found))
