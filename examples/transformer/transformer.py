# SPDX-License-Identifier: Apache-2.0
"""Text classification by a transformer block: tokens and their places, attention, dropout, Adam."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

import edl

WORDS, LENGTH, WIDTH = 20, 12, 8


class TransformerBlock(layers.Layer):
    def __init__(self, rate: float, **options: Any):
        super().__init__(**options)
        self.attention = layers.MultiHeadAttention(num_heads=2, key_dim=WIDTH)
        self.feed_forward = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(WIDTH)])
        self.norms = [layers.LayerNormalization(epsilon=1e-6) for _ in range(2)]
        self.dropouts = [layers.Dropout(rate) for _ in range(2)]

    def call(self, x: Any, training: Any = None) -> Any:
        x = self.norms[0](x + self.dropouts[0](self.attention(x, x), training=training))
        return self.norms[1](x + self.dropouts[1](self.feed_forward(x), training=training))


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, **options: Any):
        super().__init__(**options)
        self.tokens, self.places = layers.Embedding(WORDS, WIDTH), layers.Embedding(LENGTH, WIDTH)

    def call(self, x: Any) -> Any:
        return self.tokens(x) + self.places(ops.arange(LENGTH))


def model(rate: float = 0.1) -> keras.Model:
    inputs = keras.Input((LENGTH,))
    x = TransformerBlock(rate)(TokenAndPositionEmbedding()(inputs))
    x = layers.Dropout(rate)(layers.GlobalAveragePooling1D()(x))
    x = layers.Dropout(rate)(layers.Dense(8, activation="relu")(x))
    made = keras.Model(inputs, layers.Dense(2, activation="softmax")(x))
    made.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return made


def arrays() -> tuple[np.ndarray, np.ndarray]:
    """Reviews of unlike lengths, padded to the longest."""
    chance = np.random.default_rng(0)
    reviews = [chance.integers(1, WORDS, n) for n in chance.integers(3, LENGTH + 1, 48)]
    return keras.utils.pad_sequences(reviews, maxlen=LENGTH), chance.integers(0, 2, 48)


def data(split: str) -> Any:
    return edl.arrays(*arrays()) if split == "train" else None  # random labels cannot be predicted
