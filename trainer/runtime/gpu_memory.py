# SPDX-License-Identifier: Apache-2.0
"""How much of the machine TensorFlow may take: GPU memory (`worker.gpuMemory`), threads (`local.threads`)."""

from __future__ import annotations


def set_gpu_memory(allowed: str | int) -> None:
    """Configure TensorFlow's use of each visible GPU's memory. Call it before the first operation.

    The variable TF_FORCE_GPU_ALLOW_GROWTH, if it is set, overrides "growth" and "all" in TensorFlow itself.

    Args:
        allowed: "growth" to allocate memory when it is needed, "all" to reserve it at once, which is
            TensorFlow's default, or a limit in MiB.

    Raises:
        RuntimeError: TensorFlow has initialized its GPUs already.
    """
    if allowed == "all":
        return
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        if isinstance(allowed, int):
            limited = tf.config.LogicalDeviceConfiguration(memory_limit=allowed)
            tf.config.set_logical_device_configuration(gpu, [limited])
        else:
            tf.config.experimental.set_memory_growth(gpu, True)


def set_threads(threads: int, deterministic: bool = False) -> None:
    """Limit TensorFlow's threads, before its first operation; 0 leaves their number to TensorFlow.

    Args:
        deterministic: let each operation give the same bits again, or raise an error.
    """
    if deterministic:
        import tensorflow as tf

        tf.config.experimental.enable_op_determinism()
    if threads:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
