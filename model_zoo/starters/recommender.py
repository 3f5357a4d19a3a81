# SPDX-License-Identifier: Apache-2.0
"""A recommender: does this user like this item? Vectors of users and items, as large as you have ids.

With `--set mode=hybrid` the vectors are on parameter servers, and with `mode=train` in each worker.
"""

import keras
import numpy as np

import edl

USERS, ITEMS, TASTES = 2_000, 500, 4


def model() -> keras.Model:
    """Build and compile the model: a user's vector times an item's, and how popular an item is."""
    user = keras.Input((), dtype="int64", name="user")
    item = keras.Input((), dtype="int64", name="item")
    likes = edl.layers.Embedding(16, input_dim=USERS, name="users")(user)
    offers = edl.layers.Embedding(16, input_dim=ITEMS, name="items")(item)
    popular = edl.layers.Embedding(1, input_dim=ITEMS, initializer="zeros", name="popularity")(item)
    score = keras.layers.add([keras.layers.Dot(axes=-1)([likes, offers]), popular])
    model = keras.Model({"user": user, "item": item}, score)
    model.compile(
        optimizer=keras.optimizers.Adam(0.02),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.AUC(from_logits=True, name="auc")],
    )
    return model


def data(split: str) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return ids of users and items, int64 [records], and whether they fit, float32 [records, 1]."""
    rng = np.random.default_rng(0 if split == "train" else 1)
    records = 40_000 if split == "train" else 4_000
    user, item = rng.integers(0, USERS, records), rng.integers(0, ITEMS, records)
    liked = user % TASTES == item % TASTES
    return {"user": user, "item": item}, liked.astype("float32")[:, None]
