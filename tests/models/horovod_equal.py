# SPDX-License-Identifier: Apache-2.0
"""A plain Horovod script: each optimizer on several ranks, against one process with the whole batch.

`keras` is Keras 3, or Keras 2 with --legacy-keras.
Rank 1 dies in the first attempt, so that all ranks start again from the top.
"""

import os
import signal
from typing import Any

import horovod.tensorflow.keras as hvd
import numpy as np
import pytest
import tensorflow as tf

keras: Any = tf.keras
hvd.init()
attempt = f"attempt-{hvd.rank()}"
first = not os.path.exists(attempt)
open(attempt, "a").write("x")
if first:
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allgather_object("the others wait")  # until the death of rank 1 ends this process

rank, size = hvd.rank(), hvd.size()
features = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
targets = features.sum(1, keepdims=True)
BATCH, STEPS = 32, 6


def make_model(*layers: Any) -> Any:
    layers = layers or (keras.layers.Dense(3), keras.layers.Dense(1))
    model = keras.Sequential([keras.Input((4,)), *layers])
    for number, weight in enumerate(model.weights):
        weight.assign(np.random.default_rng(number).normal(size=weight.shape) * 0.3)
    return model


def make_rows() -> Any:
    """A model with sparse gradients: of the rows for positive and for negative numbers."""
    rows = (keras.layers.Discretization([0.0]), keras.layers.Embedding(3, 2), keras.layers.Flatten())
    return make_model(*rows, keras.layers.Dense(1))


def make_line() -> Any:
    return make_model(keras.layers.Dense(1))


def gradients(model: Any, records: slice, scale: float = 1.0) -> list[tf.Tensor]:
    with tf.GradientTape() as tape:
        loss = scale * tf.reduce_mean((model(features[records]) - targets[records]) ** 2)
    return tape.gradient(loss, model.trainable_variables)


def exact(model: Any, records: slice, scale: float = 1.0) -> list[tf.Tensor]:
    """Gradients that half precision holds without rounding: means of small whole numbers."""
    with tf.GradientTape() as tape:
        loss = scale * tf.reduce_mean(model(np.round(features[records] * 2)))
    return tape.gradient(loss, model.trainable_variables)


def check(name: str, model: Any, expected: Any) -> None:
    values = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    alone = np.concatenate([np.ravel(weight) for weight in expected.get_weights()])
    on_all = hvd.allgather_object(values.tobytes().hex())
    assert len(set(on_all)) == 1, f"{name}: the ranks differ"
    difference = np.abs(values - alone).max()
    assert difference < 1e-6, f"{name}: {difference} from one process"
    print(f"{name}: equal")


def train(
    make: Any, passes: int = 1, make_model: Any = make_model, gradients: Any = gradients, **options: Any
) -> None:
    scale = size if options.get("op") == hvd.Sum else 1
    optimizer = hvd.DistributedOptimizer(
        make(), backward_passes_per_step=passes, average_aggregated_gradients=True, **options
    )
    model, expected, alone = make_model(), make_model(), make()
    part = BATCH // size // passes
    for step in range(STEPS):
        start = step * BATCH % len(features)
        alone.apply_gradients(
            zip(
                gradients(expected, slice(start, start + BATCH), scale),
                expected.trainable_variables,
                strict=True,
            )
        )
        for number in range(passes):
            mine = start + (number * size + rank) * part
            optimizer.apply_gradients(
                zip(gradients(model, slice(mine, mine + part)), model.trainable_variables, strict=True)
            )
    check(f"{type(alone).__name__} {passes} {sorted(options)}", model, expected)


train(lambda: keras.optimizers.SGD(0.05, momentum=0.9))
train(lambda: keras.optimizers.Adam(0.01), groups=2)
train(lambda: keras.optimizers.AdamW(0.01))
train(lambda: keras.optimizers.Adam(0.01), passes=4)
train(lambda: keras.optimizers.SGD(0.05), passes=4, op=hvd.Sum)
train(lambda: keras.optimizers.Adam(0.01), op=hvd.Sum)
half = hvd.Compression.fp16
train(lambda: keras.optimizers.AdamW(0.01), make_model=make_line, gradients=exact, compression=half)
train(lambda: keras.optimizers.SGD(0.05), make_model=make_rows)
train(lambda: keras.optimizers.SGD(0.05), make_model=make_rows, sparse_as_dense=True)
if "tf_keras" in keras.Model.__module__:
    train(lambda: keras.optimizers.legacy.SGD(0.05, momentum=0.9, decay=0.1))
    train(lambda: keras.optimizers.legacy.Adam(0.01), passes=4)
    print("on Keras 2")
assert isinstance(gradients(make_rows(), slice(4))[0], tf.IndexedSlices)

# The statistics of all ranks, and the gradients through them.
normalized, plain = make_model(hvd.SyncBatchNormalization()), make_model(keras.layers.BatchNormalization())
for model, mine in ((normalized, slice(rank, None, size)), (plain, slice(None))):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(features[mine] * 3 + 5, training=True) - targets[mine]) ** 2)
    slopes = tape.gradient(loss, model.trainable_variables)
    if model is normalized:
        slopes = [hvd.allreduce(tf.convert_to_tensor(slope)) for slope in slopes]
    keras.optimizers.SGD(0.1).apply_gradients(zip(slopes, model.trainable_variables, strict=True))
check("SyncBatchNormalization", normalized, plain)

# By `fit`, with the callbacks, from different weights on each rank.
model, expected = make_model(), make_model()
if rank:
    for weight in model.weights:
        weight.assign(weight + 1.0)
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))  # the first batch is before the broadcast
model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], experimental_run_tf_function=False)
history = model.fit(
    features[rank::size],
    targets[rank::size],
    batch_size=8,
    verbose=0,
    callbacks=[
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateScheduleCallback(1.0, lambda epoch: 0.0),
    ],
)
check("fit", model, expected)
assert len({round(losses[0], 9) for losses in hvd.allgather_object(history.history["loss"])}) == 1
assert history.history["lr"] == [0.0]

optimizer.lr = 0.5
tf.keras.backend.set_value(optimizer.lr, 0.25)
assert tf.keras.backend.get_value(optimizer.lr) == 0.25
assert optimizer.variables() == optimizer.variables
assert hvd.allreduce(np.array([rank], np.float32), average=False).tolist() == [sum(range(size))]
assert hvd.broadcast_object({"rank": rank, "of": (size,)}, 1) == {"rank": 1, "of": (size,)}
assert hvd.allgather_object(np.float32(rank)) == [np.float32(0), np.float32(1)]
version1: Any = tf.compat.v1
with tf.Graph().as_default(), version1.Session() as session:
    assert hvd.broadcast_object([rank], 1) == [1]
    assert hvd.allgather_object(rank, session) == [0, 1]
    assert session.run([hvd.local_rank_op(), hvd.local_size_op()]) == [hvd.local_rank(), hvd.local_size()]
model.save(f"model-{rank}.keras")
assert hvd.load_model(f"model-{rank}.keras").optimizer.horovod.op == hvd.Average
for module in ("horovod.torch", "horovod.spark", "horovod.runner"):
    with pytest.raises(ImportError, match="not part of edl"):
        __import__(module)
print("all are right")
