# SPDX-License-Identifier: Apache-2.0
"""Several inputs and outputs: a ticket's title, text and tags give its priority and its department.

It follows the example of Keras' guide to the functional API.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

import edl

WORDS, TITLE, TEXT, TAGS, DEPARTMENTS = 100, 6, 20, 8, 4
RECORDS = 4_000


def data(split: str) -> Any:
    """Made tickets: each department has its own words. Tag 0 is urgent, and so is one word in the title."""
    chance = np.random.default_rng(0)
    department = chance.integers(0, DEPARTMENTS, RECORDS)
    text = chance.integers(1, WORDS // 2, (RECORDS, TEXT))
    text[:, :5] = WORDS // 2 + department[:, None] * 10 + chance.integers(0, 10, (RECORDS, 5))
    title = chance.integers(2, WORDS, (RECORDS, TITLE))
    title[chance.uniform(size=RECORDS) < 0.3, 0] = 1
    tags = (chance.uniform(size=(RECORDS, TAGS)) < 0.2).astype("float32")
    urgent = ((title[:, 0] == 1) | (tags[:, 0] == 1)).astype("float32")
    tickets = {"title": title, "text": text, "tags": tags}
    return edl.split((tickets, {"priority": urgent, "department": department}), validation=0.2)[split]


def model() -> keras.Model:
    title, text = keras.Input((TITLE,), name="title"), keras.Input((TEXT,), name="text")
    tags = keras.Input((TAGS,), name="tags")
    words = layers.Embedding(WORDS, 16)
    both = [layers.GlobalAveragePooling1D()(words(text)), layers.GlobalMaxPooling1D()(words(title)), tags]
    together = layers.Concatenate()(both)
    priority = layers.Dense(1, activation="sigmoid", name="priority")(together)
    department = layers.Dense(DEPARTMENTS, name="department")(together)
    made = keras.Model([title, text, tags], {"priority": priority, "department": department})
    made.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss={
            "priority": "binary_crossentropy",
            "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        },
        loss_weights={"priority": 1.0, "department": 0.2},
        metrics={"priority": ["accuracy"], "department": ["accuracy"]},
    )
    return made
