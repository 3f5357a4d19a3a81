# SPDX-License-Identifier: Apache-2.0
"""`fit` with horovod.keras' optimizer and its callback, as Horovod's guide has it."""

import horovod.keras as hvd
import keras
from the_model import BATCH, EPOCHS, data, model

hvd.init()
built = model()
built.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01)), built.loss)
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
x, y = (values[hvd.rank() :: hvd.size()] for values in data("train"))
built.fit(x, y, batch_size=BATCH // hvd.size(), epochs=EPOCHS, verbose=0, callbacks=callbacks)
print("trained")
