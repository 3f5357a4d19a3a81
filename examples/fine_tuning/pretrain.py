# SPDX-License-Identifier: Apache-2.0
"""Train a backbone on the digits 0 to 4, and write it to a file.

python pretrain.py FILE.keras
"""

from __future__ import annotations

import sys

import keras
from keras import layers
from sklearn.datasets import load_digits

if __name__ == "__main__":
    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    backbone = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Conv2D(32, 3, activation="relu"),
            layers.GlobalMaxPooling2D(),
        ],
        name="backbone",
    )
    trained = keras.Sequential([backbone, layers.Dense(5)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained.compile(optimizer=keras.optimizers.Adam(0.01), loss=loss)
    trained.fit(images[labels < 5], labels[labels < 5], epochs=10, verbose=0)
    backbone.save(sys.argv[1])
