# SPDX-License-Identifier: Apache-2.0
"""A worker, built from the job's values and the user's module, and warmed up.

Importing this module takes seconds: TensorFlow and Horovod. So the worker connects to the master before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import keras

from edl.config import Config
from edl.contract import modes
from edl.contract.evaluation import FINAL
from edl.contract.proto import edl_pb2 as pb
from edl.contract.steps import Steps
from edl.data import Reader
from edl.errors import ModelError
from edl.formatting import class_numbers
from edl.layers.row_location import keep_rows_elsewhere, saved_tables
from edl.trainer.agreement.exact_sums import BLOCKS
from edl.trainer.callbacks.callbacks import Callbacks
from edl.trainer.callbacks.history import MAX_TOLD, HistoryFiles, as_json
from edl.trainer.callbacks.rules import accepted
from edl.trainer.checkpoint.checkpointing import Checkpointing, of_job
from edl.trainer.checkpoint.source import saved_classes, saved_counts
from edl.trainer.checkpoint.warm_start import of_job as warm_start_of_job
from edl.trainer.evaluation.evaluation import RingEvaluation
from edl.trainer.evaluation.metrics import BlockMetrics, EvaluationMetrics
from edl.trainer.export.exporter import Exporter
from edl.trainer.export.preflight import run_preflight
from edl.trainer.export.verification import Verification
from edl.trainer.model import user_model
from edl.trainer.model.graphs import keep_xla_explicit
from edl.trainer.model.user_model import UserModel
from edl.trainer.parts.async_loop import AsyncLoop
from edl.trainer.parts.part import LoopPart
from edl.trainer.parts.restore import Restore
from edl.trainer.parts.sample import SampleReport
from edl.trainer.ps_client.client import PsClient
from edl.trainer.records.batches import Batch, Batches, Wait, patiently
from edl.trainer.records.records import Records
from edl.trainer.records.splits import memorized, refuse_empty
from edl.trainer.ring.horovod import HorovodRing
from edl.trainer.runtime.error_report import format_error
from edl.trainer.runtime.log import log
from edl.trainer.runtime.retry import tried_again
from edl.trainer.runtime.watchdog import Computing, Watch, uncounted
from edl.trainer.session.client import MasterStream
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.start.assembly import assemble
from edl.trainer.start.build_data import source_of, wait_for_readers
from edl.trainer.start.build_inference import build_inference
from edl.trainer.start.build_learner import (
    advised,
    explained,
    learner_of,
    model_of,
    ps_learner_of,
    samples_of,
)
from edl.trainer.start.build_servers import connected, servers_of
from edl.trainer.start.startup import Context, abandon, begin, ring_of
from edl.trainer.start.warm_up import warm_up
from edl.trainer.state import State
from edl.trainer.step.interfaces import SampleLoss
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.own_step import OwnStepLearner
from edl.trainer.step.ps_learner import PsLearner
from edl.trainer.worker import Worker

MEBIBYTE = 1 << 20
AHEAD = 0.25  # share of the buffer for batches that are read ahead; the rest is for open blocks


def build(stream: MasterStream) -> Worker:
    """Build the worker of an open stream, and warm it up.

    Raises:
        EdlError: the values, the model or the data are invalid, or the master has ended this worker
            meanwhile.
    """
    begun = begin(stream)
    config, doing = begun.config, begun.doing
    with begun.starting():
        keras.utils.set_random_seed(config.training.seed)
        name = config.model.module or "model.source"
        doing.now(f"{name}: the import of the module")
        keep_xla_explicit()
        module = user_model.of_job(config)
        context = Context(**vars(begun), module=module, name=name, ring=ring_of(stream, HorovodRing))
        if config.servers or not config.is_decided:
            keep_rows_elsewhere()
        return trainer_of(context) if config.trains else inference_of(context)


def inference_of(context: Context) -> Worker:
    """Return the worker of a job that evaluates or predicts (mode=evaluate, mode=predict)."""
    config, stream, name = context.config, context.stream, context.name
    where = config.init_from.path
    servers = connected(config, stream, context.ring) if config.servers else None
    with saved_tables(partial(saved_counts, where), where) if servers is None else nullcontext():
        context.doing.now(f"{name}: model()")
        model = model_of(config, context.module, context.warn)
        context.doing.now(f"{name}: the first use of the model")
        return build_inference(context, model, servers)


def trainer_of(context: Context) -> Worker:
    """Return the worker of a job that trains."""
    session, module, doing = context.session, context.module, context.doing
    doing.now(f"{context.name}: model()")
    model = model_of(context.config, module, context.warn)
    reader, records, samples = data_of(context)
    source = source_of(context.config, module, reader, records, session.warn)
    learner, servers = learner_and_servers_of(context, model, samples)
    config = context.config  # with the mode that the model has decided
    buffer = config.data.buffer_mebibytes * MEBIBYTE
    wait = session.waiting.result
    ahead, blocks = buffer * AHEAD, BLOCKS * config.training.deterministic
    batches = Batches(
        source, config.training.batch_size, ahead, ready=learner.ready, wait=wait, blocks=blocks
    )
    computing = context.compute(lambda: context.ring.waits or context.waits_for_server())
    state = State(learner, batches.steps, uncounted if config.asynchronous else computing)
    evaluating = context.compute(context.waits_for_server)
    doing.now(f'{context.name}: data("{config.evaluation.split}"), and the first evaluation of the model')
    watch = context.watchdog.watch
    evaluation = evaluation_of(
        config, module, learner, samples, batches.steps, watch, context.warn, evaluating, reader, wait
    )
    sample_loss = first_steps(context, model, learner, records, samples)
    verification = verification_of(context)
    report = Telemetry(session, batches.steps, near_end=verification.begin if verification else None)
    async_loop = use_servers(context, learner, servers, batches, report, computing, lambda: state.ledger.step)
    checkpoints, begin = checkpoint_of(context, model, learner, servers, batches)
    doing.now(f"{context.name}: callbacks()")
    callbacks = callbacks_of(config, module, learner, batches.steps, watch, context.warn)
    # Servers may lose their rows, and then the job may have to begin again with these weights.
    first = learner.parts() if servers is not None else ()
    ending = Ending(state, learner, session, HistoryFiles(context.results), callbacks)
    export = exporter_of(context, model, learner, ending, verification)
    worker = assemble(
        config,
        session,
        context.ring,
        state,
        batches,
        report,
        Restore(state, checkpoints, begin, first),
        export,
        servers=servers,
        async_loop=async_loop,
        evaluation=evaluation,
        keep=export.keep,
        callbacks=callbacks,
        history=ending.history,
        more=[SampleReport(sample_loss, module.known.digests)],
    )
    ending.parts = worker.parts
    wait_for_readers(context.name, source, doing)
    return worker


@dataclass
class Ending:
    """The end of a model's training, before the model is saved.

    Args:
        callbacks: the user's; None without any.
        parts: those of the worker, which is assembled with this.
    """

    state: State
    learner: KerasLearner | OwnStepLearner
    session: Session
    history: HistoryFiles
    callbacks: Callbacks | None
    parts: Sequence[LoopPart] = ()

    def __call__(self) -> bool:
        """End the training. True if the model's values have changed."""
        try:
            for part in self.parts:
                part.finish()
        finally:
            self.learner.finish_training()
        epochs = self.state.ledger.epochs
        try:
            return self.callbacks is not None and self.callbacks.end(epochs)
        finally:
            self.history.end(epochs.history)
            self.session.say(history=pb.History(json=as_json(epochs.history[-MAX_TOLD:])))


def data_of(context: Context) -> tuple[Reader, Records, list[Batch]]:
    """Return the training's records, and batches of the first ones, to trace and try the model with."""
    config, module = context.config, context.module
    context.doing.now(f'{context.name}: data("train")')
    reader = module.reader("train")
    assert reader is not None
    refuse_empty(len(reader), "train", module.name, config.data.allow_empty)
    records = Records(
        reader,
        module.feed_of("train"),
        module.name,
        context.watchdog.watch,
        config.training.seed,
        config.data.shuffle,
        lenient=config.data.max_bad_records > 0,
        transform=module.transform_of("train"),
    )
    buffer = config.data.buffer_mebibytes * MEBIBYTE * (1 - AHEAD)
    records.choose_layout(buffer, config.workers, config.training.deterministic)
    context.doing.now(f"{context.name}: the first records, and the first use of the model with them")
    return reader, records, samples_of(records)


def learner_and_servers_of(
    context: Context, model: keras.Model, samples: Sequence[Batch]
) -> tuple[KerasLearner | OwnStepLearner, PsClient | None]:
    """Return the learner of the model, and the job's parameter servers; None if it has none.

    With mode=auto, the model's tables decide the mode here.
    """
    config, stream, ring, training = context.config, context.stream, context.ring, context.config.training
    if config.asynchronous:
        with explained(context.module, model, samples, training.batch_size):
            ps_learner = ps_learner_of(model, samples, training, context.warn)
        return ps_learner, connected(config, stream, ring)
    with advised(config, model), explained(context.module, model, samples, training.batch_size):
        learner = learner_of(model, samples, ring, training, context.warn)
    if not config.is_decided:
        context.config = config = config.decided(modes.decided(config.mode, len(learner.tables)))
        context.session.say(built=pb.Built(tables=len(learner.tables)))
    return learner, servers_of(config, stream, ring, learner)


def use_servers(
    context: Context,
    learner: KerasLearner | OwnStepLearner,
    servers: PsClient | None,
    batches: Batches,
    report: Telemetry,
    computing: Computing,
    step: Callable[[], int],
) -> AsyncLoop | None:
    """Let the learner use the job's parameter servers, if it has any.

    Args:
        step: returns the number of the present step.

    Returns:
        the loop that trains with asynchronous servers; None if the ring's loop trains.
    """
    stream, session = context.stream, context.session
    async_loop = None
    if isinstance(learner, PsLearner):
        assert servers is not None
        async_loop = AsyncLoop(
            context.config, session, learner, servers, batches, report, computing=computing
        )
        learner.use(async_loop, step)
    elif servers is not None:
        assert isinstance(learner, KerasLearner)
        learner.use(servers, step)
    if servers is not None and stream.runs_preflight and stream.output and learner.missing():
        session.warn(learner.missing())
    return async_loop


def verification_of(context: Context) -> Verification | None:
    """Return the process that loads and tries exported models; None if exports are not verified."""
    config = context.config
    if not (config.export.verify and context.stream.output):
        return None
    return Verification(config.elastic.startup_timeout_seconds, config.local.threads)


def exporter_of(
    context: Context,
    model: keras.Model,
    learner: KerasLearner | OwnStepLearner,
    finish: Callable[[], bool],
    verification: Verification | None,
) -> Exporter:
    """Return what saves the model.

    Args:
        finish: ends the training of the model; True if its values have changed.
        verification: verifies exports; None to skip the verification.
    """
    config, stream = context.config, context.stream
    return Exporter(
        model,
        context.module,
        context.session,
        context.watchdog.watch,
        finish,
        output=context.results,
        job_output=context.output,
        salvage=Path(stream.salvage) if stream.salvage else None,
        room_seconds=config.elastic.disk_full_timeout_seconds,
        step_seconds=config.elastic.step_timeout_seconds,
        further=config.export.further,
        verification=verification,
        source=config.model.source,
        whole=learner.whole,
        live=learner.live,
        missing=learner.missing,
        abandon=partial(abandon, stream),
    )


def first_steps(
    context: Context,
    model: keras.Model,
    learner: KerasLearner | OwnStepLearner,
    records: Records,
    samples: Sequence[Batch],
) -> SampleLoss | None:
    """Warm the model up in a ring of one, and try its evaluation and saving. Its state is unchanged then.

    Returns:
        the loss of the first records; None if there are no records, or losses cannot be compared.
    """
    if not records.layout.records:
        return None
    config, stream = context.config, context.stream
    before = learner.kept()
    context.doing.now(f"{context.name}: the first step of the model")
    with explained(context.module, model, samples, config.training.batch_size):
        sample_loss = warm_up(config, context.ring, learner, records)
    if stream.runs_preflight:
        context.doing.now(f"{context.name}: trying out the evaluation and the saving of the model")
        with learner.whole():  # the rows in it are those of the warm-up
            run_preflight(
                model,
                context.module,
                context.watchdog.watch,
                config.data.allow_empty,
                context.session.warn,
                bool(stream.output),
                config.export.further,
                samples[0].x if samples else None,
                config.export.verify,
            )
    learner.restore(before)
    return sample_loss


def checkpoint_of(
    context: Context,
    model: keras.Model,
    learner: KerasLearner | OwnStepLearner,
    servers: PsClient | None,
    batches: Batches,
) -> tuple[Checkpointing | None, Callable[[], None] | None]:
    """Return the checkpoints of the worker, and the function that does a warm start; None each without."""
    config, stream, session = context.config, context.stream, context.session
    checkpoints = of_job(
        config, session, learner, stream.run_id, servers, context.module.labels.classes or ()
    )
    warm_start = warm_start_of_job(config, model, learner, session.began_with, servers)
    if warm_start is None:
        return checkpoints, None
    if stream.runs_preflight:
        there, here = saved_classes(config.init_from.path), context.module.labels.classes
        if there and here and there != here:
            session.warn(
                f"initFrom.path was trained with the classes {class_numbers(there)}, and this job trains "
                f"with {class_numbers(here)}"
            )
        own, _ = checkpoints.newest(batches.layout) if checkpoints else (0, None)
        if not own:
            seconds = config.elastic.startup_timeout_seconds / 2
            # Check it now, so that an error does not wait for the other workers.
            tried_again(warm_start.check, seconds, session.warn, lambda: session.stopped)
    return checkpoints, warm_start.begin


def evaluation_of(
    config: Config,
    module: UserModel,
    learner: KerasLearner | OwnStepLearner,
    samples: Sequence[Batch],
    steps: Steps,
    watch: Watch,
    warn: Callable[[str], None],
    evaluating: Computing,
    train: Reader,
    wait: Wait = patiently,
) -> RingEvaluation | None:
    """Return how the ring evaluates the model; None if it cannot.

    It cannot without records for the evaluation, and without metrics that can be combined across ranks.

    Args:
        train: the records of the training.
        wait: waits for records; the ring may end this.

    Raises:
        ModelError: `evaluation.split` names a split that the model's data() has no records for.
    """
    of, buffer = config.evaluation, config.data.buffer_mebibytes * MEBIBYTE
    sources = {}
    for split, reader in module.held_out().items():
        if len(reader):
            sources[split] = Records(
                reader, module.feed_of(split), module.name, watch, transform=module.transform_of(split)
            )
            if told := memorized(train, reader, module.source(split)):
                warn(told)
    if of.split == FINAL and FINAL not in sources:
        raise ModelError(f"evaluation.split is {FINAL!r}, and {module.name}: data({FINAL!r}) has no records")
    if told := module.advice:
        warn(told)
    if not sources or not samples:
        return None
    try:
        of_blocks = config.training.deterministic
        metrics = (BlockMetrics if of_blocks else EvaluationMetrics)(
            learner.model, samples[0], warn, learner.lookups, learner.others
        )
    except Exception as error:  # one worker reports it for all: the preflight's
        log.warning(f"the ring does not evaluate the model: {format_error(error)}")
        return None
    batches = {
        split: Batches(source, of.batch_size, buffer * AHEAD, wait=wait, blocks=BLOCKS * of_blocks)
        for split, source in sources.items()
    }
    sizes = {split: source.layout.records for split, source in sources.items()}
    return RingEvaluation(config.evaluation_plan(steps, sizes), batches, metrics, watched=evaluating)


def callbacks_of(
    config: Config,
    module: UserModel,
    learner: KerasLearner | OwnStepLearner,
    steps: Steps,
    watch: Watch,
    notify: Callable[[str], None],
) -> Callbacks | None:
    """Return the callbacks of the user's module; None if it has none to be called.

    Raises:
        ModelError: one of them cannot be supported.
    """
    given = accepted(module.callbacks(), config, notify) if module.callbacks is not None else []
    epochs = config.training.epochs
    return Callbacks(given, learner, steps.per_epoch, epochs, watch) if given and steps.records else None
