# SPDX-License-Identifier: Apache-2.0
"""`Model.fit` within `hvd.elastic.run`, with the three callbacks that keep its state."""

import horovod.tensorflow.keras as hvd
import images
import signalled
import tensorflow as tf

EPOCHS, RATE = 24, 0.001

hvd.init()
signalled.at_a_commit()
print("Keras is", tf.keras.Model.__module__.partition(".")[0], flush=True)
images.choose_gpu(hvd.local_rank())
data, model = images.dataset(), images.model()
optimizer = hvd.DistributedOptimizer(
    tf.optimizers.Adam(RATE * hvd.size()), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(
    optimizer,
    tf.losses.SparseCategoricalCrossentropy(),
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)
model.fit(data, steps_per_epoch=1, epochs=1, callbacks=None)  # so that all variables exist
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def reset() -> None:
    tf.keras.backend.set_value(state.model.optimizer.lr, RATE * hvd.size())
    state.model.fit(data, steps_per_epoch=1, epochs=1, callbacks=None)


state.register_reset_callbacks([reset])
callbacks = [
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))


@hvd.elastic.run
def train(state: hvd.elastic.KerasState) -> None:
    state.model.fit(
        data, steps_per_epoch=6 // hvd.size(), epochs=EPOCHS - state.epoch, callbacks=callbacks, verbose=1
    )


train(state)
