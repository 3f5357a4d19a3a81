# SPDX-License-Identifier: Apache-2.0
"""A model out of a checkpoint, or a trained one, in a format that is asked for: `edl model export`.

    python -m edl.trainer.programs.export_checkpoint < REQUEST

Promise: what comes out is the model that would be saved if the training ended at that step. It is built by
the job's own module, as a worker builds it, and nothing of it is trained. It needs no ring and no master.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from edl import config as config_module
from edl.checkpoints import Loaded, Store
from edl.config import Config
from edl.errors import CheckpointError, ConfigError, EdlError, ModelError
from edl.layers.row_location import keep_rows_elsewhere
from edl.trainer.agreement.epochs import without_memory
from edl.trainer.checkpoint.source import saved_classes
from edl.trainer.embedding.replacement import replaced
from edl.trainer.embedding.saved_rows import RowsOfCheckpoint, dims
from edl.trainer.export import formats, samples, saved_file
from edl.trainer.export.fresh import built
from edl.trainer.export.saved_file import FAILURES
from edl.trainer.export.verification import Found, Verification
from edl.trainer.model import user_model
from edl.trainer.model.user_model import UserModel
from edl.trainer.records.records import Records
from edl.trainer.runtime.error_report import format_error
from edl.trainer.start.build_learner import Alone, learner_of, ps_learner_of, samples_of
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.own_step import OwnStepLearner
from edl.trainer.step.ps_learner import DENSE


@dataclass(frozen=True)
class Request:
    """A request to export a model.

    Args:
        values: the values of the job.
        trained: the file of the trained model; empty to export a checkpoint.
        checkpoints: the address of the checkpoints.
        step: the step of the checkpoint; None for the newest whole checkpoint.
        name: the name of the format.
        output: the path to write to.
    """

    values: Mapping[str, Any]
    trained: str
    checkpoints: str
    step: int | None
    name: str
    output: str


def main() -> int:
    """Run the request on standard input. Return the exit code: 2 if values or model must be changed."""
    request = Request(**json.load(sys.stdin))
    try:
        print(export(request))
    except EdlError as error:
        print(f"edl: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError | ModelError) else 1
    return 0


def export(request: Request) -> str:
    """Write what is requested, load it again, and return the outcome in words.

    Raises:
        ModelError: the model cannot be written in this format.
        EdlError: there is nothing to export, or what was written is not the model.
    """
    config = config_module.parse(request.values)
    formats.refuse_missing([request.name])
    found = Found()
    with contextlib.ExitStack() as held:
        verification = Verification(config.elastic.startup_timeout_seconds)
        held.callback(verification.close)
        if config.export.verify:
            verification.begin()  # beside what follows, for it takes seconds
            if verification.unseen:
                raise EdlError(verification.unseen)
        keras.utils.set_random_seed(config.training.seed)
        module = user_model.of_job(config)
        if request.trained:  # its labels are numbered already, and the records of the training may be away
            module.labels.classes = ()
            with contextlib.suppress(EdlError):  # a damaged file is named where it is loaded
                module.labels.classes = saved_classes(request.trained) or ()
        features = samples.features_of(module)
        model, what = (
            _trained(request, module, features)
            if request.trained
            else _restored(request, config, module, held)
        )
        path = Path(request.output)
        try:
            classes = module.labels.classes or ()
            write = partial(formats.write, model, request.name, sample=features, classes=classes)
            formats.put(path, write, os.getpid())
        except FAILURES as error:  # what Keras raises, or a disk
            raise ModelError(f"{path}: cannot be written as {request.name}: {format_error(error)}") from error
        if config.export.verify:
            sample = samples.of(model, features)
            verification.ask(sample, {request.name: path}, module, config.model.source)
            found = verification.result()[request.name]
            if not found.verified:
                why = found.wrong or f"is not verified: {found.unseen}"
                raise EdlError(f"{path} was written, but {why}")
            what += ", loaded again in a process of its own"
    note = saved_file.note(path) if request.name == "keras" else ""
    if found.needs_code:
        note = saved_file.by_its_code(found.needs_code, path.name)
    return "\n".join(filter(None, [f"{path}: {what}", note]))


def _trained(request: Request, module: UserModel, features: Any) -> tuple[keras.Model, str]:
    path = Path(request.trained)
    try:
        model = saved_file.load(path, module.names, is_own=False)
    except FAILURES as error:
        try:
            model = built(path, module, features)
        except FAILURES:
            raise ModelError(f"{path} cannot be loaded: {format_error(error)}") from error
    return model, f"the trained model as {request.name}"


def _restored(
    request: Request, config: Config, module: UserModel, held: contextlib.ExitStack
) -> tuple[keras.Model, str]:
    """Return the model with the checkpoint's state, as the end of a training leaves it.

    Until `held` is closed, the model has its rows as variables.

    Raises:
        ModelError: the checkpoint is of a different model.
    """
    loaded = _loaded(Store.open(request.checkpoints), request)
    manifest = loaded.checkpoint.manifest
    if manifest.of_servers:  # a directory of checkpoints does not name its job
        keep_rows_elsewhere()
    reader = module.reader("train")
    assert reader is not None
    feed, transform = module.feed_of("train"), module.transform_of("train")
    records = Records(reader, feed, module.name, lenient=True, transform=transform)
    batches = samples_of(records)
    with replaced(config.ps.replace_embeddings if manifest.of_servers else 0):
        model = module.model()
    # Nothing is trained here, and nothing sent.
    training = config.training.model_copy(update={"on_inexact_loss": "allow", "compression": "none"})
    learner: KerasLearner | OwnStepLearner
    if manifest.of_servers and DENSE in dims(loaded.checkpoint):  # of a job with mode=ps
        learner = ps_learner_of(model, batches, training, lambda _: None)
    else:
        learner = learner_of(model, batches, Alone(), training, lambda _: None)
    variables = without_memory(manifest)
    theirs = [(v.dtype, v.shape) for v in variables]
    ours = [(d.dtype, d.shape) for d in learner.variable_specs()]
    if manifest.model != learner.fingerprint() or theirs != ours:
        raise ModelError(
            f"the checkpoint of step {manifest.step:,} in {request.checkpoints} is of another model than "
            f"{module.name} builds: its layers, variables, loss or optimizer differ"
        )
    found = [np.frombuffer(loaded.tensors[v.name].data, np.uint8) for v in variables]
    learner.take_over(learner.prepared(found))
    learner.finish_training()
    if isinstance(learner, KerasLearner) and learner.tables:
        learner.use(RowsOfCheckpoint(loaded.checkpoint, learner.tables))
        held.enter_context(learner.whole())
    return model, f"the model of step {manifest.step:,} (epoch {manifest.epoch + 1}) as {request.name}"


def _loaded(store: Store, request: Request) -> Loaded:
    if request.step is None:
        newest = store.load_newest(lambda text: print(f"edl: {text}", file=sys.stderr))
        if newest is None:
            raise CheckpointError(f"{request.checkpoints}: no whole checkpoint found")
        return newest
    found = {checkpoint.step: checkpoint for checkpoint in store.checkpoints()}
    if request.step not in found:
        steps = ", ".join(map(str, found)) or "none"
        raise CheckpointError(
            f"{request.checkpoints}: no checkpoint of step {request.step} found (there are: {steps})"
        )
    return Loaded(found[request.step], found[request.step].read())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of TensorFlow and of the user's module have nothing left to say
