# SPDX-License-Identifier: Apache-2.0
"""keras.distribution.initialize and DataParallel, as Keras' guide has it, with the TensorFlow backend."""

import json
import os

import keras
from the_model import BATCH, EPOCHS, data, model

cluster = json.loads(os.environ["TF_CONFIG"])
addresses = cluster["cluster"]["worker"]
keras.distribution.initialize(
    job_addresses=",".join(addresses), num_processes=len(addresses), process_id=cluster["task"]["index"]
)
keras.distribution.set_distribution(keras.distribution.DataParallel())
model().fit(*data("train"), batch_size=BATCH, epochs=EPOCHS, verbose=0)
print("trained")
