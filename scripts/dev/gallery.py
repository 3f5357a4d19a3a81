# SPDX-License-Identifier: Apache-2.0
"""`gallery.py NAME JOB PICTURE.svg`: draw what an example's model has learned, for `gallery-pictures`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from edl.contract import artifacts
from edl.report import pictures, svg
from edl.report.lanes import WIDTH
from edl.report.tables import COLOURS

FINE = re.compile(rb"(\.\d\d)\d+")
LINES = ("blue", "orange", "green", "purple")
Job = Path


def trained(name: str, job: Job) -> tuple[Any, Any]:
    """Return the example's module, and its model with the weights of the job."""
    module = import_module(f"examples.{name}.{name}")
    model = module.model()
    weights = job / "model.weights.h5"
    if weights.exists():
        model.built = True  # its networks are built, which hold all weights
        model.load_weights(weights)
        return module, model
    import keras

    classes = {key: value for key, value in vars(module).items() if isinstance(value, type)}
    return module, keras.models.load_model(job / artifacts.MODEL, classes, compile=False)


def draw_history(axes: Any, job: Job, names: dict[str, str]) -> None:
    """Draw columns of the history, with the label of each."""
    history = json.loads((job / artifacts.HISTORY).read_text())
    for colour, (name, label) in zip(LINES, names.items(), strict=False):
        values = history[name]
        axes.plot(range(1, len(values) + 1), values, color=COLOURS[colour], label=label)
    axes.set_xlabel("epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(loc="best")


def show(axes: Any, rows: dict[str, Any], texts: Sequence[tuple[str, str]] = ()) -> None:
    """Show rows of equally large images as one picture.

    Args:
        rows: images by label, [n, height, width] grey from 0 to 1 or [n, height, width, 3].
        texts: one above each image, and its colour.
    """
    gap = 1
    labels, drawn, texts, titled = [], [], list(texts), bool(texts)
    for label, images in rows.items():
        images = np.asarray(images, "f8")
        images = images if images.ndim == 4 else np.repeat(images[..., None], 3, axis=-1)
        high, wide = images.shape[1:3]
        above = high // 2 if titled else 1
        bordered = np.pad(
            np.clip(images, 0, 1), ((0, 0), (above, 0), (0, gap), (0, 0)), constant_values=np.nan
        )
        for column in range(len(images) if titled else 0):
            text, colour = texts.pop(0)
            at = column * (wide + gap) + wide / 2, len(drawn) * (high + above) + above - 1
            axes.text(*at, text, ha="center", va="bottom", color=COLOURS[colour])
        labels.append(label)
        drawn.append(np.concatenate(bordered, axis=1))
    whole = np.concatenate(drawn)
    whole = np.concatenate([np.nan_to_num(whole), ~np.isnan(whole[..., :1])], axis=-1)  # gaps are transparent
    axes.imshow(whole, interpolation="none")
    axes.set_xticks([])
    axes.set_yticks([row * (high + above) + above + high / 2 for row in range(len(labels))], labels)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.grid(visible=False)


def sides(height: float) -> tuple[Figure, Any, Any]:
    """Return a figure with axes for curves on the left, and for images on the right."""
    figure = Figure((WIDTH, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(4, 5))
    return figure, left, right


def vae(job: Job) -> Figure:
    module, model = trained("vae", job)
    images = np.asarray(module.feed(module.data("train").read(0, 8))[0])
    figure, left, right = sides(3.0)
    names = {"total_loss": "total", "reconstruction_loss": "reconstruction", "kl_loss": "KL divergence"}
    draw_history(left, job, names)
    left.set_ylabel("loss")
    mean = model.encoder.predict(images, verbose=0)[0]
    walk = np.stack([np.linspace(-2, 2, 8)] * 2, axis=1)  # diagonals of the latent space
    decoded = (model.decoder.predict(points, verbose=0)[..., 0] for points in (mean, walk, walk * (1, -1)))
    labels = ("rebuilt", "generated\n(diagonal)", "generated\n(the other)")
    show(right, {"digit": images[..., 0], **dict(zip(labels, decoded, strict=True))})
    return figure


def dcgan(job: Job) -> Figure:
    module, model = trained("dcgan", job)
    real = np.asarray(module.feed(module.data("train").read(0, 8))[0])[..., 0]
    figure, left, right = sides(2.8)
    draw_history(left, job, {"d_loss": "discriminator", "g_loss": "generator"})
    left.set_ylabel("loss")
    points = np.random.default_rng(0).normal(size=(24, module.LATENT))
    fakes = model.generator.predict(points, verbose=0)[..., 0]
    show(right, {"real": real, "generated": fakes[:8], "": fakes[8:16], " ": fakes[16:]})
    return figure


def contrastive(job: Job) -> Figure:
    module, model = trained("contrastive", job)
    images = np.asarray(module.data("train").read(0, 1000)[0])
    figure, left, right = sides(3.0)
    draw_history(left, job, {"c_loss": "contrastive", "p_loss": "linear probe"})
    left.set_ylabel("loss")
    features = model.encoder.predict(images, verbose=0)
    features /= np.linalg.norm(features, axis=1, keepdims=True) + 1e-9
    near = [np.argsort(-features @ features[query])[:10] for query in range(5)]
    for row, query in zip(near, range(5), strict=True):
        row[:] = [query, *row[row != query][:9]]
    show(right, {f"image {1 + query}": images[row, ..., 0] for query, row in enumerate(near)})
    right.set_title("an image, and those with the most similar features")
    return figure


def segmentation(job: Job) -> Figure:
    module, model = trained("segmentation", job)
    images, masks = (part[:6] for part in module.arrays())
    figure, left, right = sides(2.8)
    draw_history(left, job, {"loss": "training"})
    left.set_ylabel("loss")
    found = model.predict(images, verbose=0).argmax(-1)
    colours = np.array([to_rgb(COLOURS[name]) for name in ("grid", "blue", "orange")])
    show(right, {"image": images, "mask": colours[masks[..., 0]], "predicted": colours[found]})
    return figure


def classified(name: str, job: Job, first: int) -> Figure:
    """Draw the accuracy, and images held out with their predicted digits."""
    module, model = trained(name, job)
    held_out = module.data("validation")
    every = len(held_out) // 18
    images, labels = (part[::every][:18] for part in held_out.read(0, len(held_out)))
    figure, left, right = sides(3.0)
    draw_history(left, job, {"accuracy": "training", "val_accuracy": "held out"})
    left.set_ylabel("accuracy")
    images = np.asarray(images, "f4")
    found = model.predict(images, verbose=0).argmax(-1)
    texts = [
        (str(first + digit), "ink" if label == digit else "red")
        for label, digit in zip(labels, found, strict=True)
    ]
    images = images[..., 0] / max(1.0, images.max())
    show(right, {"": images[:6], " ": images[6:12], "  ": images[12:]}, texts)
    right.set_title("images held out, and the predicted digit (red: wrong)")
    return figure


def several_inputs(job: Job) -> Figure:
    figure = Figure((WIDTH, 2.8), layout="constrained")
    for axes, output in zip(figure.subplots(1, 2, sharey=True), ("priority", "department"), strict=True):
        shown = {f"{output}_accuracy": "training", f"val_{output}_accuracy": "held out"}
        draw_history(axes, job, shown)
        axes.set_title(output)
        axes.set_ylabel("accuracy")
    return figure


def memorized(job: Job, accuracy: str) -> Figure:
    """Draw the loss and the accuracy on the records of the training, the only ones there are."""
    figure = Figure((WIDTH, 2.8), layout="constrained")
    for axes, name, label in zip(
        figure.subplots(1, 2), ("loss", accuracy), ("loss", "accuracy"), strict=True
    ):
        draw_history(axes, job, {name: "training"})
        axes.set_ylabel(label)
    return figure


DRAWN = {
    "contrastive": contrastive,
    "dcgan": dcgan,
    "distillation": lambda job: memorized(job, "sparse_categorical_accuracy"),
    "fine_tuning": lambda job: classified("fine_tuning", job, 5),
    "image_folder": lambda job: classified("image_folder", job, 0),
    "segmentation": segmentation,
    "several_inputs": several_inputs,
    "transformer": lambda job: memorized(job, "accuracy"),
    "vae": vae,
}

if __name__ == "__main__":
    name, job, picture = sys.argv[1:]
    with pictures.styled():
        drawn = svg.written(DRAWN[name](Path(job)), "svg")
    # A hundredth of a point cannot be seen, and the digits after it are a third of a file with many points.
    Path(picture).write_bytes(re.sub(rb"(?<=[ML] )[-\d. ]+", lambda at: FINE.sub(rb"\1", at[0]), drawn))
