# SPDX-License-Identifier: Apache-2.0
"""The learner of a worker: of the model that model() returns and the values of the job.

A model that cannot be trained, or cannot be trained in this mode, is refused here, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import keras
import tensorflow as tf

from edl.config import Config
from edl.config.job import Training
from edl.errors import ModelError
from edl.layers.embedding import Embedding
from edl.trainer.embedding.replacement import replaced
from edl.trainer.model import mistakes
from edl.trainer.model.model_support import has_own_step, refuse_unless_compiled
from edl.trainer.model.user_model import UserModel
from edl.trainer.records.batches import Batch
from edl.trainer.records.records import Records
from edl.trainer.step.blocks import BlockLearner
from edl.trainer.step.inner_sum import RingAllReduce
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.own_step import OwnStepLearner
from edl.trainer.step.ps_learner import PsLearner

TRIED_RECORDS = 5  # to build, trace and try the model with: so that it divides into two unlike parts


def samples_of(records: Records) -> list[Batch]:
    """Return batches of the first good records, to build, trace and try a model with.

    The first batch has several records, the others one each: if feed() pads each batch, their lengths differ.
    """
    tried = records.first(TRIED_RECORDS)
    return [records.batch_at(several) for several in (tried, *([i] for i in tried))] if tried else []


class Alone:
    """A ring of one, as far as a learner needs it."""

    in_graph = None

    def reduce(self, vector: Any) -> Any:
        """The sum over one rank is its own vector."""
        return vector


def model_of(config: Config, module: UserModel, warn: Callable[[str], None]) -> keras.Model:
    """Return the model of model(), with large embeddings replaced if the job says so.

    Args:
        warn: takes a line about each replaced embedding.

    Raises:
        ModelError: one of them cannot be, or it is no model.
    """
    with replaced(config.replaces_embeddings) as told:
        model = module.model()
    if not isinstance(model, keras.Model):
        hint = ": is its `return` missing" if model is None else ""
        raise ModelError(
            f"{module.name}: model() must return a compiled keras.Model, not {type(model).__name__}{hint}"
        )
    mistakes.refuse_strategy(module, model)
    for line in told:
        warn(line)
    return model


@contextmanager
def advised(config: Config, model: keras.Model) -> Iterator[None]:
    """Inside this context, a refused model's error also says how to place its rows, if the mode is auto.

    Raises:
        ModelError: it is refused.
    """
    try:
        yield
    except ModelError as error:
        layers = (layer for layer in model._flatten_layers() if isinstance(layer, Embedding))
        if config.is_decided or not any(layer.on_servers for layer in layers):
            raise
        raise ModelError(
            f"{error}. (mode is auto, so the rows of edl.layers.Embedding are on parameter servers. With "
            "mode=train they are in the ring; each needs an input_dim then)"
        ) from error


@contextmanager
def explained(
    module: UserModel, model: keras.Model, samples: Sequence[Batch], batch_size: int
) -> Iterator[None]:
    """Inside this context, explain a library's error about a common mistake in the model or its data.

    Raises:
        Mistake: a mistake explains the error; its cause is the library's error.
        Exception: the library's error, if no mistake explains it.
    """  # noqa: DOC501 (raised again)
    try:
        yield
    except (ValueError, TypeError, AttributeError, KeyError, tf.errors.OpError) as error:
        sample = samples[0] if samples else None
        if (mistake := mistakes.behind(error, module, model, sample, batch_size)) is not None:
            raise mistake from error
        raise


def ps_learner_of(
    model: Any, samples: Sequence[Batch], training: Training, warn: Callable[[str], None]
) -> PsLearner:
    """Return the learner of a model whose weights are all on parameter servers (mode=ps).

    Args:
        samples: batches of real records; empty if the data has no records.
        warn: takes each warning about the model.

    Raises:
        ModelError: the model cannot be trained with all weights on servers; the text says why.
    """
    refuse_unless_compiled(model)
    if has_own_step(model):
        raise ModelError(
            "mode is ps, and the model has its own train_step(): its gradients are applied there, and not on "
            "servers. Take it out, or set mode=train"
        )
    sample = samples[0] if samples else None
    return PsLearner(model, sample, samples[1:], training.on_inexact_loss, warn, training.accumulate_steps)


class RingReducer(Protocol):
    """The part of a ring that a learner needs."""

    @property
    def in_graph(self) -> RingAllReduce | None:
        """The all-reduce as an operation of TensorFlow's graphs; None if this ring has none."""
        ...

    def reduce(self, vector: Any) -> Any:
        """Return the sum of `vector`, float32 [n], over all ranks."""
        ...


def learner_of(
    model: Any,
    samples: Sequence[Batch],
    ring: RingReducer,
    training: Training,
    warn: Callable[[str], None],
) -> KerasLearner | OwnStepLearner:
    """Return the learner of a model that is trained over a ring, with its own train_step() if it has one.

    Args:
        samples: batches of real records; empty if the data has no records.
        warn: takes each warning about the model.

    Raises:
        ModelError: the model cannot be trained over a ring; the text says why.
    """
    refuse_unless_compiled(model)
    sample = samples[0] if samples else None
    inexact, pieces = training.on_inexact_loss, training.accumulate_steps
    wire = "float32" if training.compression == "none" else training.compression
    if ring.in_graph is not None and wire not in ring.in_graph.WIRES:
        raise ModelError(
            f"training.compression must be none or float16: the ring's engine, Gloo, cannot sum {wire}"
        )
    if has_own_step(model):
        if pieces > 1:
            raise ModelError("training.accumulateSteps must be 1 for a model with its own train_step()")
        if wire != "float32":
            raise ModelError("training.compression must be none for a model with its own train_step()")
        if training.deterministic:
            raise ModelError(
                "training.deterministic must be false for a model with its own train_step(); if it only "
                "computes a loss, override compute_loss() instead"
            )
        return OwnStepLearner(model, sample, ring.reduce, inexact, warn)
    if training.deterministic:
        return BlockLearner(model, sample, samples[1:], ring.reduce, inexact, warn, ring.in_graph)
    return KerasLearner(model, sample, samples[1:], ring.reduce, inexact, warn, ring.in_graph, pieces, wire)
