# SPDX-License-Identifier: Apache-2.0
"""JPEG files of one size, read and decoded by TensorFlow, in processes that have imported it anyway.

One call reads and decodes all images of a batch in TensorFlow's threads, without Python's lock. Pillow takes
the lock several times for each image, and its threads spend more time on passing it around than they save.

The values are those of Pillow: both use libjpeg-turbo with its accurate DCT. Pillow decodes all images that
could differ: CMYK, and files that libjpeg cannot decode to the end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from edl.data.files.addresses import File

SUFFIXES = (".jpg", ".jpeg")
THREADS = 4  # at most: as many cores as a reader process has (data.workers=auto)
CMYK = 4  # channels


def decode(files: Sequence[File]) -> np.ndarray | None:
    """Decode local files to RGB.

    Returns:
        uint8 [n, height, width, 3]. None if TensorFlow is not imported, a file cannot be read or
        is not an RGB or grey JPEG image, or sizes differ.

    Raises:
        DataError: a file has changed since it was found.
    """
    tf = sys.modules.get("tensorflow")  # edl.data does not need it
    if tf is None or not all(file.name.lower().endswith(SUFFIXES) for file in files):
        return None
    try:
        decoded: np.ndarray = _decoder()(np.array([os.fsencode(file.name) for file in files], object))
    except tf.errors.OpError:
        return None  # Pillow decodes it, or names the file and the reason
    for file in files:
        file.refuse_changed()
    return decoded


@lru_cache(maxsize=1)
def _decoder() -> Callable[[np.ndarray], np.ndarray]:
    """The function that decodes the files of some names.

    It is a session, because setting TensorFlow's seed, as readers do for each batch, makes `tf.function`
    prepare its graph again: 40 ms of a core. A session also has threads of its own.
    """
    tf = sys.modules["tensorflow"]
    threads = min(len(os.sched_getaffinity(0)), THREADS)

    def image(name: Any) -> Any:
        content = tf.io.read_file(name)
        channels = tf.io.extract_jpeg_shape(content)[2]
        with tf.control_dependencies([tf.debugging.assert_less(channels, CMYK)]):
            return tf.io.decode_jpeg(content, channels=3, dct_method="INTEGER_ACCURATE")

    with tf.Graph().as_default() as graph:
        names = tf.compat.v1.placeholder(tf.string, [None])
        form = tf.TensorSpec([None, None, 3], tf.uint8)
        images = tf.map_fn(image, names, parallel_iterations=threads, fn_output_signature=form)
    config = tf.compat.v1.ConfigProto(
        device_count={"GPU": 0},
        intra_op_parallelism_threads=1,
        inter_op_parallelism_threads=threads,
        use_per_session_threads=True,
    )
    decoder: Callable[[np.ndarray], np.ndarray] = tf.compat.v1.Session(
        graph=graph, config=config
    ).make_callable(images, [names])
    return decoder
