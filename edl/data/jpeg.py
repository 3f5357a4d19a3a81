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
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from edl.data.files import File

SUFFIXES = (".jpg", ".jpeg")
PARALLEL = 16  # images in work at the same time, at most; TensorFlow's number of threads limits them, too
CMYK = 4  # channels


def decode(files: Sequence[File]) -> np.ndarray | None:
    """Decode local files to RGB.

    Returns:
        uint8 [n, height, width, 3], read-only. None if TensorFlow is not imported, a file cannot be read or
        is not an RGB or grey JPEG image, or sizes differ.

    Raises:
        DataError: a file has changed since it was found.
    """
    tf = sys.modules.get("tensorflow")  # edl.data does not need it
    if tf is None or not all(file.name.lower().endswith(SUFFIXES) for file in files):
        return None
    try:
        decoded = _decoder()(tf.constant([os.fsencode(file.name) for file in files], tf.string))
    except tf.errors.OpError:
        return None  # Pillow decodes it, or names the file and the reason
    for file in files:
        file.refuse_changed()
    return np.asarray(memoryview(decoded))  # without a copy


@lru_cache(maxsize=1)
def _decoder() -> Any:
    tf = sys.modules["tensorflow"]

    def image(name: Any) -> Any:
        content = tf.io.read_file(name)
        channels = tf.io.extract_jpeg_shape(content)[2]
        with tf.control_dependencies([tf.debugging.assert_less(channels, CMYK)]):
            return tf.io.decode_jpeg(content, channels=3, dct_method="INTEGER_ACCURATE")

    def images(names: Any) -> Any:
        with tf.device("/CPU:0"):
            form = tf.TensorSpec([None, None, 3], tf.uint8)
            return tf.map_fn(image, names, parallel_iterations=PARALLEL, fn_output_signature=form)

    return tf.function(images, input_signature=[tf.TensorSpec([None], tf.string)], autograph=False)
