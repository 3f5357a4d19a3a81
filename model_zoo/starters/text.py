# SPDX-License-Identifier: Apache-2.0
"""A classifier of sentences: praise or complaint."""

import keras
import numpy as np

WORDS = 16  # of a sentence; longer ones are cut
SUBJECTS = ["the food", "the room", "the staff", "the view", "breakfast", "our guide"]
PRAISE = ["was wonderful", "made us happy", "was better than expected", "is worth every coin"]
COMPLAINT = ["was a disappointment", "made us leave", "was worse than expected", "is not worth a coin"]
VOCABULARY = sorted({word for text in (*SUBJECTS, *PRAISE, *COMPLAINT) for word in text.split()})


def sentences(records: int, seed: int) -> tuple[list[str], np.ndarray]:
    """Make sentences and their labels, int64 [records]; 1 is praise. Replace them by yours."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, records)
    ends = [PRAISE if label else COMPLAINT for label in labels]
    return [f"{rng.choice(SUBJECTS)} {rng.choice(end)}" for end in ends], labels


def model() -> keras.Model:
    """Build and compile the model: embeddings of words, and a layer that reads them in order."""
    model = keras.Sequential(
        [
            keras.Input((WORDS,), dtype="int64"),
            keras.layers.Embedding(len(VOCABULARY) + 1, 16, mask_zero=True),
            keras.layers.GRU(16),
            keras.layers.Dense(1),
        ]
    )
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(threshold=0.0, name="accuracy")],
    )
    return model


def data(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Return words by number, int64 [records, 16], padded with 0, and labels, float32 [records, 1]."""
    texts, labels = sentences(4_000, seed=0) if split == "train" else sentences(500, seed=1)
    numbers = {word: number for number, word in enumerate(VOCABULARY, start=1)}
    ids = np.zeros((len(texts), WORDS), "int64")
    for row, text in zip(ids, texts, strict=True):
        known = [numbers[word] for word in text.split() if word in numbers][:WORDS]
        row[: len(known)] = known
    return ids, labels.astype("float32")[:, None]
