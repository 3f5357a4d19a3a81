# SPDX-License-Identifier: Apache-2.0
"""Keras' own evaluation of tests/models/evaluated.py, on one thread: the peer of a ring's.

Evaluates once for each line of stdin, and prints how many seconds that took.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf

from tests.models import evaluated

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
batch = int(sys.argv[1])
model = evaluated.model()
x, y = evaluated.records("validation")
model.evaluate(x, y, batch_size=batch, verbose=0)
print("here", flush=True)
for _ in sys.stdin:
    began = time.perf_counter()
    model.evaluate(x, y, batch_size=batch, verbose=0)
    print(time.perf_counter() - began, flush=True)
