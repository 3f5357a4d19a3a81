# SPDX-License-Identifier: Apache-2.0
"""A worker of a job that does not train: `mode` is evaluate or predict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from edl.config import Config
from edl.contract.artifacts import PREDICTIONS
from edl.contract.evaluation import PREDICTED, EvaluationPlan
from edl.contract.layout import Layout, StepSlice
from edl.contract.proto import edl_pb2 as pb
from edl.data import Reader
from edl.data.formats.image_files import classes_of
from edl.errors import CheckpointError, ConfigError, DataError, ModelError
from edl.formatting import class_numbers
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.checkpoint.source import saved_classes
from edl.trainer.checkpoint.warm_start import of_job as warm_start_of_job
from edl.trainer.embedding.interfaces import Start
from edl.trainer.embedding.local_rows import LocalRows
from edl.trainer.embedding.lookups import Lookups
from edl.trainer.evaluation.evaluation import RingEvaluation
from edl.trainer.evaluation.inference import InferenceLearner, Predictor
from edl.trainer.evaluation.metrics import EvaluationMetrics
from edl.trainer.evaluation.prediction import (
    DONE,
    FORMATS,
    ON_MASTER,
    Book,
    PredictionError,
    PredictionFiles,
    RingPrediction,
)
from edl.trainer.model.batch_types import tensor_tree
from edl.trainer.model.model_support import refuse_unless_compiled
from edl.trainer.model.user_model import UserModel
from edl.trainer.parts.evaluation import Evaluation
from edl.trainer.parts.restore import Restore
from edl.trainer.parts.sample import SampleReport
from edl.trainer.ps_client.client import PsClient
from edl.trainer.records.batches import Batch, Batches, Source
from edl.trainer.records.records import Records
from edl.trainer.runtime.error_report import format_error, format_traceback
from edl.trainer.runtime.retry import tried_again
from edl.trainer.runtime.watchdog import Compute, Watch
from edl.trainer.session.client import MasterStream
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.start.assembly import assemble
from edl.trainer.start.build_data import source_of, wait_for_readers
from edl.trainer.start.startup import Context
from edl.trainer.start.warm_up import run_alone
from edl.trainer.state import State
from edl.trainer.step.sample_loss import output_norm, with_fixed_weights
from edl.trainer.worker import Worker

SAMPLE_RECORDS = 5  # to build, trace and try the model with
MEBIBYTE = 1 << 20


class NoRecords:
    """A source without records, for a job that does not train."""

    layout = Layout(0)

    def lay_out(self, layout: Layout) -> None:
        assert layout == self.layout

    def batch(self, start: int, stop: int, part: StepSlice) -> Batch | None:
        raise AssertionError("there are no records")


def build_inference(context: Context, model: Any, servers: PsClient | None = None) -> Worker:
    """Build the worker of a job that evaluates or predicts.

    Args:
        servers: the servers with the rows of the model's tables; None if these are variables of the model.

    Raises:
        DataError: the split has no records, or a record is not what was expected.
        ModelError: servers are configured, and the model has no tables for them.
        EdlError: the values, the model or the data are not what they should be.
    """
    config, stream, session, module = context.config, context.stream, context.session, context.module
    watch, computing = context.watchdog.watch, context.compute(context.waits_for_server)
    split = PREDICTED if config.mode == "predict" else config.evaluation.split
    know_classes(config, module)
    reader = _reader_of(config, module, split)
    if told := unknown_classes(config, module, reader):
        session.warn(told)
    records = Records(reader, module.feed_of(split), module.name, watch, transform=module.transform_of(split))
    sample = records.batch_at(range(min(SAMPLE_RECORDS, len(reader))))
    create_variables(model, sample)
    lookups = _lookups_of(config, model, servers)
    learner = InferenceLearner(model, context.ring.reduce, lookups.tables)
    batches = Batches(NoRecords(), config.training.batch_size)
    plan = config.evaluation_plan(batches.steps, {split: len(reader)})
    evaluation: Evaluation
    compared: Callable[[Batch], float]
    files: PredictionFiles | None = None
    source = source_of(config, module, reader, records, session.warn, split)
    if config.mode == "predict":
        files = _files(config, stream, module, len(reader))
        predict = Predictor(model, sample, lookups)
        evaluation = _prediction_of(context, plan, source, predict, files, computing)
        compared = partial(_predicted_norm, predict)
    else:
        ahead = config.data.buffer_mebibytes * MEBIBYTE
        wait = session.waiting.result
        held_out = {split: Batches(source, config.evaluation.batch_size, ahead, wait=wait)}
        metrics = metrics_of(model, sample, lookups)
        evaluation, compared = RingEvaluation(plan, held_out, metrics, watched=computing), metrics.loss
    sample_loss = with_fixed_weights(learner, lambda: records.batch_at(range(len(sample))), compared)
    rows = RememberedRows(servers) if servers is not None else None
    warm_start = warm_start_of_job(config, model, learner, session.began_with, rows)
    if warm_start is not None and stream.runs_preflight:
        warm_start.check()

    def begin() -> Ledger | None:
        if warm_start is not None:
            warm_start.begin()
        if files is None:
            return None
        return _first_missing(config, module, learner, rows, plan, files, len(reader))

    # The first real ring must not wait for graphs to be traced.
    alone = Batches(NoRecords(), config.training.batch_size)
    run_alone(config, context.ring, learner, alone, epochs=0)
    report = Telemetry(session, batches.steps)
    state = State(learner, batches.steps)
    restore = Restore(state, None, begin, learner.parts() if servers is not None else (), trains=False)
    if servers is not None:
        lookups.rows, lookups.at = servers, lambda: state.ledger.step
    end = partial(_end, session, files)
    worker = assemble(
        config,
        session,
        context.ring,
        state,
        batches,
        report,
        restore,
        end,
        servers=servers,
        evaluation=evaluation,
    )
    worker.parts.append(SampleReport(sample_loss, module.known.digests))
    wait_for_readers(context.name, source, context.doing)
    return worker


def know_classes(config: Config, module: UserModel) -> None:
    """Number the classes of labels as the model's training did, if the model to load says how.

    Raises:
        ConfigError: there is no such model.
        CheckpointError: it cannot be read.
    """
    if not config.trains:
        module.labels.classes = ()  # and not those of data("train"), which such a job does without
        module.labels.classes = saved_classes(config.init_from.path) or ()


def unknown_classes(config: Config, module: UserModel, reader: Reader) -> str:
    """A warning if labels are evaluated whose numbers may not be those of the training; empty if not."""
    names = classes_of(reader)
    if config.mode != "evaluate" or module.labels.classes or not names:
        return ""
    return (
        "initFrom.path has no names of classes, so the labels are numbered by these records alone: "
        f"{class_numbers(names)}. If the training had other folders, name its classes: "
        "edl.images(..., classes=[...])"
    )


def _reader_of(config: Config, module: UserModel, split: str) -> Reader:
    """Return the records that the model is evaluated on, or predicts.

    Raises:
        DataError: the split has no records.
    """
    reader = module.reader(split)
    if reader is None or not len(reader):
        raise DataError(
            f"{module.name}: {module.source(split)} has no records, and mode is {config.mode} "
            f"(data.{split} can name them)"
        )
    return reader


def _lookups_of(config: Config, model: Any, servers: PsClient | None) -> Lookups:
    """Return the lookups of the model's tables, which see local rows until the job begins.

    Raises:
        ModelError: servers are configured, and the model has no tables for them.
    """
    lookups = Lookups(model, trained=False)
    if servers is not None and not lookups.tables:
        raise ModelError(
            f"mode is {config.mode} and ps.servers is {config.servers}, and the model has no "
            "edl.layers.Embedding, so nothing of it would be on parameter servers: set ps.servers=0"
        )
    lookups.rows = LocalRows(lookups.tables)
    return lookups


def _prediction_of(
    context: Context,
    plan: EvaluationPlan,
    source: Source,
    predict: Predictor,
    files: PredictionFiles,
    computing: Compute,
) -> RingPrediction:
    """Return the prediction of all records by the ring. Each batch has a limit of time."""
    module, watch = context.module, context.watchdog.watch
    keep = partial(_kept, module, watch) if module.write is not None else lambda outputs, ids: outputs

    def limited(batch: Batch, following: Callable[[], Batch | None]) -> Mapping[str, np.ndarray]:
        with computing("prediction", lambda: f"the prediction of the {batch}", len(batch)):
            return predict(batch, following)

    return RingPrediction(plan, source, limited, files, keep, wait=context.session.waiting.result)


def _first_missing(
    config: Config,
    module: UserModel,
    learner: InferenceLearner,
    rows: RememberedRows | None,
    plan: EvaluationPlan,
    files: PredictionFiles,
    records: int,
) -> Ledger:
    """Begin the files of the predictions, and return the position of the first batch that they lack."""
    form = config.prediction.format if module.write is None else "done"
    size = config.prediction.part_records
    weights = learner.digest() + (f"/{rows.digest}" if rows is not None else "")
    book = Book(records, size, learner.fingerprint(), weights, form)
    (whole,) = plan.after(0, 0)
    first = files.begin(book) * size // plan.batch
    return Ledger(round=min(first, whole.end))


def create_variables(model: Any, sample: Batch) -> None:
    """Create all variables of the model."""
    if type(model).predict_step is keras.Model.predict_step:
        model.predict_on_batch(sample.x)
    else:  # which is given what `predict` gives it
        model.predict_step(keras.utils.pack_x_y_sample_weight(tensor_tree(sample)[0]))


def _predicted_norm(predict: Predictor, batch: Batch) -> float:
    """Predict a batch, and return the norm of the outputs, by which workers are compared."""
    return output_norm(predict(batch))


class RememberedRows:
    """Remembers the digest of the rows that the servers begin with."""

    def __init__(self, servers: PsClient):
        self._servers, self.digest = servers, ""

    def begin_with(self, start: Start) -> None:
        """Remember the digest of the rows, by which workers are compared, and forward them."""
        self.digest = start.digest()
        self._servers.begin_with(start)


def _files(config: Config, stream: MasterStream, module: UserModel, records: int) -> PredictionFiles:
    """Return the files of the predictions.

    Raises:
        ConfigError: no directory for predictions is configured.
    """
    url = config.prediction.dir or (stream.output and str(Path(stream.output, PREDICTIONS)))
    if not url:
        raise ConfigError(
            "mode is predict, and there is no directory for what is predicted: set prediction.dir, or on "
            "Kubernetes output.size, output.existingClaim or output.hostPath"
        )
    if url == ON_MASTER:
        url = f"master://run-{stream.run_id}/{PREDICTIONS}"
    form, session = DONE if module.write is not None else FORMATS[config.prediction.format], stream.session
    seconds = config.elastic.step_timeout_seconds
    again = partial(tried_again, seconds=seconds, tell=session.warn, must_end=lambda: bool(session.ended))
    return PredictionFiles(url, form, records, config.prediction.part_records, again)


def metrics_of(model: Any, sample: Batch, lookups: Lookups) -> EvaluationMetrics:
    """Return the metrics of an evaluation by several workers.

    Raises:
        ModelError: a metric is not the sum of what the ring's members find.
    """
    refuse_unless_compiled(model)
    told: list[str] = []
    metrics = EvaluationMetrics(model, sample, told.append, lookups)
    if not metrics.all_count and told:
        raise ModelError(
            "mode is evaluate, and not all of what the model is compiled with can be put together from what "
            f"several workers find: {'; '.join(line.partition(':')[0] for line in told)}"
        )
    return metrics


def _kept(
    module: UserModel, watch: Watch, outputs: Mapping[str, np.ndarray], ids: np.ndarray
) -> Mapping[str, np.ndarray] | None:
    """Call the user's write() with the outputs of a part, and return the outputs to keep: none.

    Raises:
        DataError: write() has returned a value.
    """
    assert module.write is not None
    with watch(lambda: f"{module.name}: write() of the records {ids[0]} to {ids[-1]}"):
        found = module.write(outputs["output"] if list(outputs) == ["output"] else dict(outputs), ids)
    if found is not None:
        raise DataError(
            f"{module.name}: write(outputs, ids) must return None, not {type(found).__name__}: it keeps what "
            "it is given, and is asked once more for records whose worker was lost meanwhile"
        )
    return None


def _end(session: Session, files: PredictionFiles | None, final_metrics: Mapping[str, float] | None) -> None:
    """Report the end of the job: there is no model to save."""
    failed = []
    if files is not None:
        try:
            files.end()
        except (PredictionError, CheckpointError) as error:
            failed.append(
                pb.PartFailed(part="prediction", why=format_error(error), traceback=format_traceback(error))
            )
    session.say(finished=pb.Finished(metrics={} if files else final_metrics, failed=failed))
