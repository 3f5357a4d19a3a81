# SPDX-License-Identifier: Apache-2.0
"""Sequences of different lengths: a mask of the embedding tells the recurrent layer where each one ends."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

import edl

RECORDS, WORDS, LONGEST = 4_000, 50, 12
PADDING = 0


def data(split: str) -> Any:
    """Made sequences. The label says whether the last word is among the first half of all words."""
    chance = np.random.default_rng(0)
    words = [chance.integers(1, WORDS, length) for length in chance.integers(3, LONGEST + 1, RECORDS)]
    labels = np.array([sequence[-1] < WORDS // 2 for sequence in words], "float32")
    padded = keras.utils.pad_sequences(words, LONGEST, padding="post", value=PADDING)
    return edl.split((padded, labels), validation=0.2, seed=1)[split]


def model() -> keras.Model:
    made = keras.Sequential(
        [
            keras.Input((LONGEST,)),
            layers.Embedding(WORDS, 8, mask_zero=True),
            layers.GRU(16),
            layers.Dense(1, activation="sigmoid"),
        ]
    )
    made.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy", metrics=["accuracy"])
    return made
