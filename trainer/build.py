"""A worker, built from the job's values and the user's module, and warmed up.

Importing this module takes seconds: TensorFlow and Horovod. So the worker connects to the master before.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import keras
import tensorflow as tf

from edl import config as config_module
from edl.config import Config
from edl.contract import modes
from edl.contract.evaluation import FINAL
from edl.contract.exit_codes import WorkerExit
from edl.contract.proto import edl_pb2 as pb
from edl.contract.steps import Steps
from edl.errors import ModelError
from edl.layers.embedding import keep_rows_elsewhere, saved_tables
from edl.trainer.async_loop import AsyncLoop
from edl.trainer.async_worker import AsyncWorker
from edl.trainer.build_inference import build_inference
from edl.trainer.build_learner import (
    TRIED_RECORDS,
    advised,
    explained,
    learner_of,
    model_of,
    ps_learner_of,
)
from edl.trainer.build_servers import connected, servers_of, step_servers_of
from edl.trainer.callbacks.callbacks import Callbacks
from edl.trainer.callbacks.history import HistoryFiles, as_json
from edl.trainer.callbacks.rules import accepted
from edl.trainer.checkpoint.checkpointing import Checkpointing, of_job
from edl.trainer.checkpoint.memory_copy import MemoryCopy
from edl.trainer.checkpoint.warm_start import of_job as warm_start_of_job
from edl.trainer.checkpoint.warm_start import saved_counts
from edl.trainer.evaluation.evaluation import RingEvaluation
from edl.trainer.evaluation.metrics import EvaluationMetrics
from edl.trainer.export.exporter import Exporter
from edl.trainer.export.preflight import refuse_empty, run_preflight
from edl.trainer.export.verification import Ahead, Verification
from edl.trainer.model import user_model
from edl.trainer.model.data import Batch, Batches
from edl.trainer.model.graphs import keep_xla_explicit
from edl.trainer.model.records import Records
from edl.trainer.model.user_model import UserModel
from edl.trainer.ps_client.async_client import AsyncPsClient
from edl.trainer.ps_client.client import PsClient
from edl.trainer.ring.horovod import HorovodRing
from edl.trainer.runtime import output_lock
from edl.trainer.runtime.error_report import format_error
from edl.trainer.runtime.log import log
from edl.trainer.runtime.retry import tried_again
from edl.trainer.runtime.termination import end_children, leave
from edl.trainer.runtime.watchdog import STARTUP_TIMEOUT, Compute, Computing, Doing, Limit, Watch, Watchdog
from edl.trainer.session.client import MasterStream
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.step.interfaces import SampleLoss
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.own_step import OwnStepLearner
from edl.trainer.step.ps_learner import PsLearner
from edl.trainer.warm_up import warm_up
from edl.trainer.worker import Worker

MOST_TOLD = 1_000  # epochs of the history in the summary, which must fit into a ConfigMap
MEBIBYTE = 1 << 20
AHEAD = 0.25  # share of the buffer for batches that are read ahead; the rest is for open blocks
OWN_TIME = 0.95  # of the startup timeout: the worker reports what hangs before the master gives it up


def build(stream: MasterStream, memory: MemoryCopy | None = None) -> Worker:
    """Build the worker of an open stream, and warm it up.

    Args:
        memory: the memory of this worker's pod, for copies of the state.

    Raises:
        EdlError: the values, the model or the data are invalid, or the master has ended this worker
            meanwhile.
    """
    config = config_module.parse(json.loads(stream.config_json))
    if config.local.threads:
        tf.config.threading.set_intra_op_parallelism_threads(config.local.threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    output = results = Path(stream.output) if stream.output else None
    if output is not None:
        output_lock.hold(output, stream.run_id)
        if config.trains and os.environ.get(output_lock.PER_RUN):
            results = output_lock.results_of(output, stream.run_id)
    elastic = config.elastic
    watchdog, doing = Watchdog(elastic.step_timeout_seconds, partial(_hung, stream)), Doing()
    startup = Limit(OWN_TIME * elastic.startup_timeout_seconds, STARTUP_TIMEOUT)
    with watchdog.watch(doing.words, startup) as start:
        start.began = stream.opened_at
        keras.utils.set_random_seed(config.training.seed)
        name = config.model.module or "model.source"
        doing.now(f"{name}: the import of the module")
        keep_xla_explicit()
        module = user_model.load(config.model.module, config.model.source)
        ring = ring_of(stream)
        context = Context(config, stream, module, name, ring, watchdog, doing, output, results)
        if config.servers or not config.is_decided:
            keep_rows_elsewhere()
        return trainer_of(context, memory) if config.trains else inference_of(context)


@dataclass
class Context:
    """The data shared by the functions of this module.

    Args:
        config: the values of the job; the mode may be decided here (mode=auto).
        name: the name of the user's module, for messages.
        doing: names the present stage of the start.
        output: the job's output directory; None if it has none.
        results: the directory of this run's results: `output`, or a directory in it.
    """

    config: Config
    stream: MasterStream
    module: UserModel
    name: str
    ring: HorovodRing
    watchdog: Watchdog
    doing: Doing
    output: Path | None
    results: Path | None

    @property
    def session(self) -> Session:
        return self.stream.session

    def warn(self, text: str) -> None:
        """Show a warning: on one worker for all, the others only log it."""
        if self.stream.runs_preflight:
            self.session.warn(text)
        else:
            log.warning(text)

    def waits_for_server(self) -> bool:
        return self.session.waits() is not None

    def compute(self, waits: Callable[[], bool]) -> Compute:
        """Limit the time of the model's code, except while `waits` is true."""
        elastic = self.config.elastic
        limits = elastic.step_timeout_seconds, elastic.startup_timeout_seconds
        return Compute(self.watchdog, *limits, waits=waits)


def ring_of(stream: MasterStream) -> HorovodRing:
    """Return this worker's end of its rings. The session can cut them."""
    session = stream.session
    interface, port = os.environ.get("EDL_RING_INTERFACE", "lo"), int(stream.address.rpartition(":")[2])
    ring = HorovodRing(stream.store_port, interface, f"worker-{session.worker}", port, stream.store_secret)
    session.cuts(ring.cut)
    return ring


def inference_of(context: Context) -> Worker:
    """Return the worker of a job that evaluates or predicts (mode=evaluate, mode=predict)."""
    config, stream, name = context.config, context.stream, context.name
    where = config.init_from.path
    servers = connected(config, stream, context.ring) if config.servers else None
    with saved_tables(partial(saved_counts, where), where) if servers is None else nullcontext():
        context.doing.now(f"{name}: model()")
        model = model_of(config, context.module, stream)
        context.doing.now(f"{name}: the first use of the model")
        return build_inference(config, stream, context.module, model, context.ring, context.watchdog, servers)


def trainer_of(context: Context, memory: MemoryCopy | None) -> Worker:
    """Return the worker of a job that trains.

    Args:
        memory: the memory of this worker's pod, for copies of the state.
    """
    session, stream, module, doing = context.session, context.stream, context.module, context.doing
    doing.now(f"{context.name}: model()")
    model = model_of(context.config, module, stream)
    records, samples = data_of(context)
    learner, servers = learner_and_servers_of(context, model, samples)
    config = context.config  # with the mode that the model has decided
    history = HistoryFiles(context.results)

    def finish() -> bool:
        """End the training of the model. True if its values have changed."""
        try:
            worker.end_epoch()
        finally:
            learner.finish_training()
        try:
            return callbacks is not None and callbacks.end(worker.state.ledger.epochs)
        finally:
            history.end(worker.state.ledger.epochs.history)
            session.say(history=pb.History(json=as_json(worker.state.ledger.epochs.history[-MOST_TOLD:])))

    def step() -> int:
        return worker.state.ledger.step

    ahead = verification_of(context)
    export = exporter_of(context, model, learner, finish, ahead)
    buffer = config.data.buffer_mebibytes * MEBIBYTE
    batches = Batches(records, config.training.batch_size, buffer * AHEAD, ready=learner.ready)
    computing = context.compute(lambda: context.ring.waits or context.waits_for_server())
    evaluating = context.compute(context.waits_for_server)
    doing.now(f'{context.name}: data("{config.evaluation.split}"), and the first evaluation of the model')
    watch = context.watchdog.watch
    evaluation = evaluation_of(
        config, module, learner, samples, batches.steps, watch, context.warn, evaluating
    )
    sample_loss = first_steps(context, model, learner, records, samples)
    report = Telemetry(session, batches.steps, near_end=ahead.prepare if ahead is not None else None)
    async_loop = None
    if isinstance(servers, AsyncPsClient):
        assert isinstance(learner, PsLearner)
        async_loop = AsyncLoop(config, session, learner, servers, batches, report, computing=computing)
        learner.use(async_loop, step)
    elif servers is not None:
        assert isinstance(learner, KerasLearner)
        learner.use(servers, step, batches.following)
    if servers is not None and stream.runs_preflight and stream.output and learner.missing():
        session.warn(learner.missing())
    checkpoints, begin = checkpoint_of(context, model, learner, servers, batches)
    if memory is not None:
        memory.open(stream.run_id, learner.fingerprint(), [len(part) for part in learner.parts()])
    doing.now(f"{context.name}: callbacks()")
    callbacks = callbacks_of(config, module, learner, batches.steps, watch, context.warn)
    parts = (
        config, session, context.ring, learner, batches, report, export,
        checkpoints, begin, evaluation, callbacks, history, memory, export.keep,
    )  # fmt: skip
    if async_loop is not None:
        worker: Worker = AsyncWorker(async_loop, *parts)
    else:
        assert not isinstance(servers, AsyncPsClient)
        worker = Worker(*parts, servers, computing)
    worker.sample_loss = sample_loss
    return worker


def data_of(context: Context) -> tuple[Records, list[Batch]]:
    """Return the training's records, and batches of the first ones, to trace and try the model with.

    The first batch has several records, the others one each: if feed() pads each batch, their lengths differ.
    """
    config, module = context.config, context.module
    context.doing.now(f'{context.name}: data("train")')
    reader = module.reader("train")
    assert reader is not None
    refuse_empty(len(reader), "train", module.name, config.data.allow_empty)
    records = Records(
        reader, module.feed_of("train"), module.name, context.watchdog.watch, config.training.seed,
        config.data.shuffle, lenient=config.data.max_bad_records > 0,
    )  # fmt: skip
    records.fit(config.data.buffer_mebibytes * MEBIBYTE * (1 - AHEAD), config.workers)
    context.doing.now(f"{context.name}: the first records, and the first use of the model with them")
    tried = records.first(TRIED_RECORDS)
    return records, [records.these(several) for several in (tried, *([i] for i in tried))] if tried else []


def learner_and_servers_of(
    context: Context, model: keras.Model, samples: Sequence[Batch]
) -> tuple[KerasLearner | OwnStepLearner, PsClient | AsyncPsClient | None]:
    """Return the learner of the model, and the job's parameter servers; None if it has none.

    With mode=auto, the model's tables decide the mode here.
    """
    config, stream, ring, training = context.config, context.stream, context.ring, context.config.training
    if config.asynchronous:
        return ps_learner_of(config, model, samples, context.warn), step_servers_of(config, stream, ring)
    with advised(config, model), explained(context.module, samples, training.batch_size):
        learner = learner_of(
            model, samples, ring, training.on_inexact_loss, context.warn, training.accumulate_steps,
            training.compression,
        )  # fmt: skip
    if not config.is_decided:
        context.config = config = config.decided(modes.decided(config.mode, len(learner.tables)))
        context.session.say(built=pb.Built(tables=len(learner.tables)))
    return learner, servers_of(config, stream, ring, learner)


def verification_of(context: Context) -> Ahead | None:
    """Return the process that loads and tries exported models; None if exports are not verified."""
    config = context.config
    if not (config.export.verify and context.stream.output):
        return None
    return Ahead(partial(Verification, config.elastic.startup_timeout_seconds, config.local.threads))


def exporter_of(
    context: Context,
    model: keras.Model,
    learner: KerasLearner | OwnStepLearner,
    finish: Callable[[], bool],
    ahead: Ahead | None,
) -> Exporter:
    """Return what saves the model.

    Args:
        finish: ends the training of the model; True if its values have changed.
        ahead: verifies exports; None to skip the verification.
    """
    config, stream = context.config, context.stream
    return Exporter(
        model, context.module, context.session, context.watchdog.watch, finish,
        output=context.results,
        job_output=context.output,
        salvage=Path(stream.salvage) if stream.salvage else None,
        room_seconds=config.elastic.disk_full_timeout_seconds,
        step_seconds=config.elastic.step_timeout_seconds,
        further=config.export.further,
        verify=ahead.take if ahead is not None else None,
        source=config.model.source,
        whole=learner.whole,
        live=learner.live,
        missing=learner.missing,
        abandon=partial(_abandon, stream),
    )  # fmt: skip


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
    sample_loss = warm_up(config, context.ring, learner, records)
    learner.warm_up()
    if stream.runs_preflight:
        context.doing.now(f"{context.name}: trying out the evaluation and the saving of the model")
        with learner.whole():  # the rows in it are those of the warm-up
            run_preflight(
                model, context.module, context.watchdog.watch, config.data.allow_empty, context.session.warn,
                bool(stream.output), config.export.further, samples[0].x if samples else None,
                config.export.verify,
            )  # fmt: skip
    learner.restore(before)
    return sample_loss


def checkpoint_of(
    context: Context,
    model: keras.Model,
    learner: KerasLearner | OwnStepLearner,
    servers: PsClient | AsyncPsClient | None,
    batches: Batches,
) -> tuple[Checkpointing | None, Callable[[], None] | None]:
    """Return the checkpoints of the worker, and the function that does a warm start; None each without."""
    config, stream, session = context.config, context.stream, context.session
    checkpoints = of_job(config, session, learner, stream.run_id, servers)
    warm_start = warm_start_of_job(config, model, learner, session.began_with, servers)
    if warm_start is None:
        return checkpoints, None
    if stream.runs_preflight:
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
) -> RingEvaluation | None:
    """Return how the ring evaluates the model; None if there are no records for it, or no metrics that
    ranks can combine."""
    of, buffer = config.evaluation, config.data.buffer_mebibytes * MEBIBYTE
    sources = {}
    for split in dict.fromkeys((of.split, FINAL)):
        if (reader := module.reader(split)) is not None and len(reader):
            sources[split] = Records(reader, module.feed_of(split), module.name, watch)
        elif split != FINAL:
            raise ModelError(
                f"evaluation.split is {split!r}, and {module.name}: data({split!r}) has no records"
            )
    if not sources or not samples:
        return None
    try:
        metrics = EvaluationMetrics(learner.model, samples[0], warn, learner.lookups, learner.others)
    except Exception as error:  # one worker reports it for all: the preflight's
        log.warning(f"the ring does not evaluate the model: {format_error(error)}")
        return None
    batches = {split: Batches(source, of.batch_size, buffer * AHEAD) for split, source in sources.items()}
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


def _hung(stream: MasterStream, why: str, stack: str) -> None:
    """Report that a call of the user's code does not return, and end the process.

    Nothing but the end of the process can end such a call.
    """
    print(f"edl worker {stream.session.worker}: {why}", file=sys.stderr, flush=True)
    stream.session.say(failed=pb.Failed(why=why, traceback=stack))
    _abandon(stream)


def _abandon(stream: MasterStream) -> NoReturn:
    """End this process, whose main thread is blocked."""
    stream.close()
    end_children()
    leave(WorkerExit.FAILED)
