# SPDX-License-Identifier: Apache-2.0
"""Check what TensorFlow and Horovod see of the GPU and whether they compute on it.

smoke.py             the operations of TensorFlow, and sums of a ring of one
smoke.py --imports   only that edl's modules can be imported

The exit status is 1 if a check failed.
"""

import importlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

failed: list[str] = []


def check(name: str, function: Callable[[], object]) -> None:
    began = time.time()
    try:
        print(f"{name}: {function()} ({time.time() - began:.1f} s)", flush=True)
    except Exception as error:
        failed.append(name)
        print(f"{name}: FAILED {type(error).__name__}: {str(error)[:500]}", flush=True)


def check_imports() -> None:
    for name in (
        "sklearn.datasets",
        "h5py",
        "edl.cli",
        "edl.trainer.start.build",
        "edl.trainer.forkserver",
        "edl.zoo.digits",
    ):
        check(f"import {name}", lambda name=name: importlib.import_module(name).__name__)
    # A process that has loaded the driver cannot fork workers that use it.
    print(
        "CUDA's driver is in this process:",
        "libcuda.so" in Path("/proc/self/maps").read_text(encoding="utf-8"),
    )


def check_tensorflow() -> None:
    import numpy as np
    import tensorflow as tf

    print(f"TensorFlow {tf.__version__}, numpy {np.__version__}")
    gpus = tf.config.list_physical_devices("GPU")
    build = tf.sysconfig.get_build_info()
    print({key: build.get(key) for key in ("cuda_version", "cudnn_version", "cuda_compute_capabilities")})
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
        print(gpu.name, tf.config.experimental.get_device_details(gpu))
    check("a GPU is visible", lambda: gpus[0].name)

    random = np.random.default_rng(0)
    a = random.normal(size=(1500, 700)).astype("f4")
    b = random.normal(size=(700, 900)).astype("f4")
    images = random.normal(size=(8, 20, 20, 3)).astype("f4")
    kernel = random.normal(size=(3, 3, 3, 16)).astype("f4")

    def compare(found: tf.Tensor, expected: np.ndarray) -> str:
        difference = np.linalg.norm(found.numpy() - expected) / np.linalg.norm(expected)
        return f"on {found.device[-5:]}, relative difference {difference:.1e}"

    def convolution() -> str:
        with tf.device("CPU"):
            expected = tf.nn.conv2d(images, kernel, 1, "SAME").numpy()
        return compare(tf.nn.conv2d(tf.constant(images), kernel, 1, "SAME"), expected)

    def gradient() -> str:
        variable = tf.Variable(kernel)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.conv2d(images, variable, 1, "SAME") ** 2)
        return tape.gradient(loss, variable).device

    def half() -> str:
        product = tf.matmul(tf.cast(a, tf.float16), tf.cast(b, tf.float16))
        return compare(tf.cast(product, tf.float32), a @ b)

    @tf.function(jit_compile=True)
    def compiled(m: tf.Tensor, n: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(tf.matmul(m, n)) * 2

    check("add", lambda: compare(tf.constant(a) + 1, a + 1))
    check("matmul", lambda: compare(tf.matmul(a, b), a.astype("f8") @ b))
    check("conv2d", convolution)
    check("gradient of conv2d", gradient)
    check("memoryview of a tensor", lambda: np.asarray(memoryview(tf.constant(a) * 2)).sum())
    check("XLA", lambda: compiled(a, b).device)
    check("svd", lambda: tf.linalg.svd(tf.constant(a[:50, :50]), compute_uv=False).device)
    check("fft", lambda: tf.signal.fft(tf.cast(tf.constant(a[0]), tf.complex64)).device)
    check("matmul in float16", half)

    import horovod.tensorflow as hvd

    print("Horovod: NCCL", hvd.nccl_built(), "CUDA", hvd.cuda_built(), "Gloo", hvd.gloo_built())
    os.environ.update(
        HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo", HOROVOD_RANK="0", HOROVOD_SIZE="1"
    )
    hvd.init()

    @tf.function
    def in_graph(x: tf.Tensor) -> tf.Tensor:
        return hvd.allreduce(x, op=hvd.Sum)

    check("all-reduce", lambda: hvd.allreduce(tf.constant(a), op=hvd.Sum).device)
    check("all-reduce in a graph", lambda: in_graph(tf.constant(a)).device)
    hvd.shutdown()


if __name__ == "__main__":
    if "--imports" in sys.argv:
        check_imports()
    else:
        check_tensorflow()
    sys.exit(1 if failed else 0)
