# SPDX-License-Identifier: Apache-2.0
"""Which of Keras' own layers and losses mix the records of a batch: the trial at the start finds them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest

from edl.trainer.model.batch_types import BatchTypes
from edl.trainer.records.batches import Batch
from edl.trainer.step.trial import Inexact, try_model
from tests.process.keras.models import dense, plain
from tests.process.keras.rings import Case, differences

K, L = keras.layers, keras.losses
RECORDS = 5
chance = np.random.default_rng(1)


def values(*shape: int) -> np.ndarray:
    return chance.uniform(0.1, 1, (RECORDS, *shape)).astype("f4")


LINE, IMAGE, VOLUME, FLAT = values(6, 3), values(8, 8, 3), values(6, 6, 6, 2), values(4)
BYTES = (255 * IMAGE).astype("f4")
IDS = chance.integers(1, 9, (RECORDS, 4))
TEXTS = np.array([["a b"], ["b"], ["c a"], ["d"], ["a"]], object)


Made = dict[str, tuple[Callable[[], Any], Any]]


def each(names: str, given: Any, *arguments: Any, **named: Any) -> Made:
    """Layers of one kind of input."""
    return {name: (partial(getattr(K, name), *arguments, **named), given) for name in names.split()}


def by_rank(kind: str, *arguments: Any, given: Any = (LINE, IMAGE, VOLUME)) -> Made:
    """Layers for lines, images and volumes."""
    found: Made = {}
    for rank, x in enumerate(given, 1):
        found |= each(kind.format(rank), x, *arguments)
    return found


# Layers by name: what makes one, and what it is called with. A tuple is several inputs.
LAYERS: Made = {
    **by_rank("AveragePooling{}D", 2),
    **by_rank("MaxPooling{}D", 2),
    **by_rank("AdaptiveAveragePooling{}D", 2),
    **by_rank("AdaptiveMaxPooling{}D", 2),
    **by_rank("GlobalAveragePooling{}D"),
    **by_rank("GlobalMaxPooling{}D"),
    **by_rank("Conv{}D", 2, 2),
    **by_rank("Conv{}DTranspose", 2, 2),
    **by_rank("Cropping{}D", 1),
    **by_rank("SpatialDropout{}D", 0.5),
    **by_rank("UpSampling{}D", 2),
    **by_rank("ZeroPadding{}D", 1),
    **by_rank("DepthwiseConv{}D", 2, given=(LINE, IMAGE)),
    **by_rank("SeparableConv{}D", 2, 2, given=(LINE, IMAGE)),
    **by_rank("ConvLSTM{}D", 2, 2, given=(values(3, 4, 2), values(3, 4, 4, 2), values(2, 3, 3, 3, 1))),
    **each("Add Average Concatenate Maximum Minimum Multiply Subtract", (FLAT, FLAT[::-1].copy())),
    **each("ActivityRegularization BatchNormalization ELU Flatten Identity LayerNormalization", FLAT),
    **each("LeakyReLU Masking PReLU RMSNormalization ReLU Softmax UnitNormalization", FLAT),
    **each("GRU LSTM SimpleRNN", LINE, 3),
    **each("AlphaDropout Dropout GaussianDropout GaussianNoise", FLAT, 0.3),
    **each("RandomElasticTransform RandomErasing RandomFlip RandomGaussianBlur RandomGrayscale", BYTES),
    **each("RandomInvert RandomPerspective", BYTES),
    **each("RandomColorDegeneration RandomHue RandomSaturation RandomSharpness", BYTES, 0.5),
    **each("RandomBrightness RandomColorJitter RandomContrast RandomRotation RandomShear", BYTES, 0.2),
    **each("RandomZoom", BYTES, 0.2),
    **each("RandomPosterization", BYTES, 3),
    **each("RandomCrop", BYTES, 4, 4),
    **each("RandomTranslation", BYTES, 0.2, 0.2),
    **each("AugMix AutoContrast ContrastLimitedAdaptiveHistogramEqualization CutMix MixUp", BYTES),
    **each("RandAugment Solarization", BYTES),
    **each("StringLookup", TEXTS, vocabulary=["a", "b", "c"]),
    **each("TextVectorization", TEXTS, vocabulary=["a", "b", "c"], output_sequence_length=3),
    "Activation": (lambda: K.Activation("tanh"), FLAT),
    "AdditiveAttention": (K.AdditiveAttention, (LINE, LINE)),
    "Attention": (K.Attention, (LINE, LINE)),
    "Bidirectional": (lambda: K.Bidirectional(K.LSTM(2)), LINE),
    "CategoryEncoding": (lambda: K.CategoryEncoding(9), IDS),
    "CenterCrop": (lambda: K.CenterCrop(4, 4), IMAGE),
    "Dense": (lambda: K.Dense(3), FLAT),
    "Discretization": (lambda: K.Discretization([0.3, 0.6]), FLAT),
    "Dot": (lambda: K.Dot(1), (FLAT, FLAT)),
    "EinsumDense": (lambda: K.EinsumDense("ab,bc->ac", 3), FLAT),
    "Embedding": (lambda: K.Embedding(9, 3), IDS),
    "GroupNormalization": (lambda: K.GroupNormalization(2), FLAT),
    "GroupedQueryAttention": (lambda: K.GroupQueryAttention(2, 2, 1), (LINE, LINE)),
    "HashedCrossing": (lambda: K.HashedCrossing(7), (IDS[:, :1], IDS[:, 1:2])),
    "Hashing": (lambda: K.Hashing(7), IDS),
    "IntegerLookup": (lambda: K.IntegerLookup(vocabulary=[1, 2, 3]), IDS),
    "MelSpectrogram": (lambda: K.MelSpectrogram(fft_length=64, sequence_stride=16), values(256)),
    "MultiHeadAttention": (lambda: K.MultiHeadAttention(2, 2), (LINE, LINE)),
    "Normalization": (lambda: K.Normalization(mean=[0.5] * 4, variance=[1.0] * 4), FLAT),
    "Permute": (lambda: K.Permute((2, 1)), LINE),
    "Pipeline": (lambda: K.Pipeline([K.Rescaling(2.0)]), IMAGE),
    "RNN": (lambda: K.RNN(K.StackedRNNCells([K.LSTMCell(2), K.GRUCell(2), K.SimpleRNNCell(2)])), LINE),
    "RepeatVector": (lambda: K.RepeatVector(2), FLAT),
    "Rescaling": (lambda: K.Rescaling(2.0), FLAT),
    "Reshape": (lambda: K.Reshape((2, 2)), FLAT),
    "Resizing": (lambda: K.Resizing(4, 4), IMAGE),
    "ReversibleEmbedding": (lambda: K.ReversibleEmbedding(9, 3), IDS),
    "STFTSpectrogram": (
        partial(K.STFTSpectrogram, frame_length=32, frame_step=16, fft_length=32),
        values(256, 1),
    ),
    "SpectralNormalization": (lambda: K.SpectralNormalization(K.Dense(2)), FLAT),
    "TimeDistributed": (lambda: K.TimeDistributed(K.Dense(2)), LINE),
    # Options that take the axis of the records.
    "Softmax(axis=0)": (lambda: K.Softmax(axis=0), FLAT),
    "UnitNormalization(axis=0)": (lambda: K.UnitNormalization(axis=0), FLAT),
    "an activity regularizer": (lambda: K.Dense(3, activity_regularizer="l2"), FLAT),
    "an orthogonal activity regularizer": (
        lambda: K.Dense(3, activity_regularizer=keras.regularizers.OrthogonalRegularizer(0.1)),
        FLAT,
    ),
}
# No layers by themselves, of other frameworks, or (Equalization) for no functional model.
NO_LAYERS = {
    "Equalization",
    "FlaxLayer",
    "GRUCell",
    "InputLayer",
    "InputSpec",
    "JaxLayer",
    "LSTMCell",
    "Lambda",
    "Layer",
    "MaxNumBoundingBoxes",
    "SimpleRNNCell",
    "StackedRNNCells",
    "TFSMLayer",
    "TorchModuleWrapper",
    "Wrapper",
}
MIX = {  # MelSpectrogram bounds its values by the largest one of the batch
    "CutMix",
    "MelSpectrogram",
    "MixUp",
    "Softmax(axis=0)",
    "UnitNormalization(axis=0)",
    "an orthogonal activity regularizer",
}


def told(model: keras.Model, x: Any, y: Any, weights: Any = None) -> str:
    """What the trial tells of a model and five records; empty if nothing."""
    lines: list[str] = []
    sample = Batch(np.arange(RECORDS), x, y, weights)
    try_model(model, BatchTypes(sample), sample, Inexact("warn", lines.append))
    return " ".join(lines)


def public(module: Any) -> set[str]:
    """The names of its classes, each once."""
    return {thing.__name__ for thing in vars(module).values() if inspect.isclass(thing)}


def test_every_layer_of_keras_is_tried() -> None:
    assert public(K) - set(LAYERS) == NO_LAYERS


@pytest.mark.parametrize("name", LAYERS)
def test_the_trial_finds_the_layers_that_mix_records(name: str) -> None:
    make, given = LAYERS[name]
    keras.utils.set_random_seed(3)
    x = list(given) if isinstance(given, tuple) else [given]
    inputs = [keras.Input(a.shape[1:], dtype="string" if a.dtype == object else a.dtype.name) for a in x]
    layer = make()
    apart = "Attention" in name and name not in ("Attention", "AdditiveAttention")
    model = keras.Model(inputs, layer(*inputs) if apart or len(x) == 1 else layer(inputs))
    model.compile("sgd", "mse")
    y = np.zeros([RECORDS, *(n or 1 for n in model.output_shape[1:])], "f4")
    assert bool(told(model, x, y)) == (name in MIX)


LABELS = np.array([0, 1, 0, 1, 2])
ONE_HOT = np.eye(3, dtype="f4")[LABELS]
MIXING_LOSSES = {"Circle", "Dice", "Tversky"}


def test_the_trial_finds_the_losses_that_mix_records() -> None:
    found = set()
    for name in sorted(public(L) - {"Loss"}):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((4,))
        x = K.Dense(12, activation="tanh")(inputs)
        outputs, y = K.Dense(3, activation="softmax")(x), ONE_HOT
        if name in ("Dice", "Tversky"):  # of values that add up to one, they are means over records
            outputs = K.Dense(3, activation="sigmoid")(x)
        elif name == "CTC":
            outputs, y = K.Reshape((4, 3))(x), 1 + np.arange(10).reshape(5, 2) % 2
        elif name in ("Circle", "CategoricalGeneralizedCrossEntropy", "SparseCategoricalCrossentropy"):
            y = LABELS
            outputs = K.UnitNormalization()(x) if name == "Circle" else outputs
        model = keras.Model(inputs, outputs)
        model.compile("sgd", getattr(L, name)())
        if told(model, FLAT, y):
            found.add(name)
    assert found == MIXING_LOSSES


def circle() -> keras.Model:
    return dense(loss=L.Circle(), layers=[K.UnitNormalization()])


@pytest.mark.parametrize(
    "case",
    [
        Case(circle, lambda: (plain()[0], np.arange(30) % 3, None), told=False),
        Case(lambda: dense(layers=[K.UnitNormalization(axis=0)]), plain, told=False),
    ],
    ids=["Circle", "UnitNormalization(axis=0)"],
)
def test_what_the_trial_finds_is_trained_differently(case: Case) -> None:
    x, y, _ = case.data()
    assert "mixes the records of a batch" in told(case.build(), x[:RECORDS], y[:RECORDS])
    assert max(differences(case)[3].values()) > 1e-3
