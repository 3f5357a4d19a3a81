"""A worker, put together from what the job's values and the user's module say; and its warm-up.

Importing this module takes seconds: TensorFlow and Horovod. So the master is greeted before.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
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
from edl.trainer.async_worker import ServedWorker
from edl.trainer.build_inference import build_frozen
from edl.trainer.build_learner import (
    TRIED_RECORDS,
    advised,
    explained,
    learner_of,
    model_of,
    served_learner_of,
)
from edl.trainer.build_servers import connected, servers_of, step_servers_of
from edl.trainer.callbacks.callbacks import Callbacks
from edl.trainer.callbacks.history import HistoryFiles, as_json
from edl.trainer.callbacks.rules import accepted
from edl.trainer.checkpoint.checkpointing import of_job
from edl.trainer.checkpoint.memory_copy import MemoryCopy
from edl.trainer.checkpoint.warm_start import of_job as warm_start_of_job
from edl.trainer.checkpoint.warm_start import saved_counts
from edl.trainer.evaluation.evaluation import RingEvaluation
from edl.trainer.evaluation.metrics import EvaluationMetrics
from edl.trainer.export.exporter import Exporter
from edl.trainer.export.preflight import refuse_empty, rehearse
from edl.trainer.export.verification import Ahead, Verification
from edl.trainer.model import user_model
from edl.trainer.model.data import Batch, Batches
from edl.trainer.model.graphs import keep_xla_explicit
from edl.trainer.model.records import Records
from edl.trainer.model.user_model import UserModel
from edl.trainer.ps_client.async_client import AsyncPsClient
from edl.trainer.ring.horovod import HorovodRing
from edl.trainer.runtime import output_lock
from edl.trainer.runtime.error_report import described
from edl.trainer.runtime.log import log
from edl.trainer.runtime.retry import tried_again
from edl.trainer.runtime.termination import end_children, leave
from edl.trainer.runtime.watchdog import STARTUP_TIMEOUT, Compute, Computing, Limit, Watch, Watchdog
from edl.trainer.session.client import MasterStream
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.own_step import OwnStepLearner
from edl.trainer.warm_up import warm_up
from edl.trainer.worker import Worker

MOST_TOLD = 1_000  # epochs of the history in the summary, which a ConfigMap has to hold
MEBIBYTE = 1 << 20
AHEAD = 0.25  # of the buffer: batches that are read ahead; the rest: open blocks
OWN_TIME = 0.95  # of the startup timeout: then the worker says what hangs, before the master gives it up


def build(stream: MasterStream, memory: MemoryCopy | None = None) -> Worker:
    """The worker of an open stream, warmed up.

    Args:
        memory: of its place, for copies of the state.

    Raises:
        EdlError: the values, the model or the data are not what they should be, or the master has
            ended this worker meanwhile.
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
        return _build(config, stream, memory, watchdog, doing, output, results)


def _build(
    config: Config,
    stream: MasterStream,
    memory: MemoryCopy | None,
    watchdog: Watchdog,
    doing: Doing,
    output: Path | None,
    results: Path | None,
) -> Worker:
    """
    Args:
        output: the job's output directory.
        results: where this run's results go: `output`, or a directory in it.
    """
    keras.utils.set_random_seed(config.training.seed)
    name = config.model.module or "model.source"
    doing.now(f"{name}: the import of the module")
    keep_xla_explicit()
    module = user_model.load(config.model.module, config.model.source)
    session = stream.session
    interface, port = os.environ.get("EDL_RING_INTERFACE", "lo"), int(stream.address.rpartition(":")[2])
    member = f"worker-{session.worker}"
    ring = HorovodRing(stream.store_port, interface, member, port, stream.store_secret)
    session.cuts(ring.cut)
    if config.servers or not config.is_decided:
        keep_rows_elsewhere()
    if not config.trains:
        where, servers = config.checkpoint.from_, connected(config, stream, ring) if config.servers else None
        with saved_tables(partial(saved_counts, where), where) if servers is None else nullcontext():
            doing.now(f"{name}: model()")
            model = model_of(config, module, stream)
            doing.now(f"{name}: the first use of the model")
            return build_frozen(config, stream, module, model, ring, watchdog, servers)
    doing.now(f"{name}: model()")
    model = model_of(config, module, stream)
    doing.now(f'{name}: data("train")')
    reader = module.reader("train")
    assert reader is not None
    size = len(reader)
    refuse_empty(size, "train", module.name, config.data.allow_empty)
    training, buffer = config.training, config.data.buffer_mebibytes * MEBIBYTE
    records = Records(reader, module.feed_of("train"), module.name, watchdog.watch, training.seed,
                      config.data.shuffle, lenient=config.data.max_bad_records > 0)  # fmt: skip
    records.fit(buffer * (1 - AHEAD), config.workers)
    doing.now(f"{name}: the first records, and the first use of the model with them")
    # Several small batches too: where feed() pads each batch by itself, they differ in length.
    tried = records.first(TRIED_RECORDS)
    samples = [records.these(several) for several in (tried, *([i] for i in tried))] if tried else []
    warn = session.warn if stream.rehearses else log.warning  # one worker tells it for all
    learner: KerasLearner | OwnStepLearner
    if config.asynchronous:
        served = served_learner_of(config, model, samples, warn)
        learner, servers = served, step_servers_of(config, stream, ring)
    else:
        with advised(config, model), explained(module, samples, training.batch_size):
            learner = learner_of(model, samples, ring, training.inexact_loss, warn, training.accumulate_steps,
                                 training.compression)  # fmt: skip
        if not config.is_decided:
            config = config.decided(modes.decided(config.mode, len(learner.tables)))
            session.say(built=pb.Built(tables=len(learner.tables)))
        servers = servers_of(config, stream, ring, learner)

    history = HistoryFiles(results)

    def finish() -> bool:
        """What is left to be done to the trained model. True: it is another one then."""
        try:
            worker.end_epoch()
        finally:
            learner.finish_training()
        try:
            return callbacks is not None and callbacks.end(worker.state.ledger.epochs)
        finally:
            history.end(worker.state.ledger.epochs.history)
            session.say(history=pb.History(json=as_json(worker.state.ledger.epochs.history[-MOST_TOLD:])))

    ahead = None
    if config.export.verify and stream.output:
        seconds, threads = config.elastic.startup_timeout_seconds, config.local.threads
        ahead = Ahead(partial(Verification, seconds, threads))
    export = Exporter(
        model, module, session, watchdog.watch, finish,
        output=results,
        job_output=output,
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
    batches = Batches(records, training.batch_size, buffer * AHEAD, ready=learner.ready)
    limits = config.elastic.step_timeout_seconds, config.elastic.startup_timeout_seconds
    for_server = lambda: session.waits() is not None  # noqa: E731
    computing = Compute(watchdog, *limits, waits=lambda: ring.waits or for_server())
    evaluating = Compute(watchdog, *limits, waits=for_server)
    doing.now(f'{name}: data("{config.evaluation.split}"), and the first evaluation of the model')
    evaluation = evaluation_of(
        config, module, learner, samples, batches.steps, watchdog.watch, warn, evaluating
    )
    sample_loss = None
    if size:
        before = learner.kept()
        doing.now(f"{name}: the first step of the model")
        sample_loss = warm_up(config, ring, learner, records)
        learner.warm_up()
        if stream.rehearses:
            doing.now(f"{name}: trying out the evaluation and the saving of the model")
            keeps = bool(stream.output)
            features = samples[0].x if samples else None
            with learner.whole():  # of rows, there are those of the warm-up
                rehearse(model, module, watchdog.watch, config.data.allow_empty, session.warn, keeps,
                         config.export.further, features, config.export.verify)  # fmt: skip
        learner.restore(before)
    report = Telemetry(session, batches.steps, near_end=ahead.prepare if ahead is not None else None)
    async_loop = None
    if config.asynchronous:
        assert isinstance(servers, AsyncPsClient)
        async_loop = AsyncLoop(config, session, served, servers, batches, report, computing=computing)
        learner.use(async_loop, lambda: worker.state.ledger.step)
    elif servers is not None:
        assert isinstance(learner, KerasLearner)
        learner.use(servers, lambda: worker.state.ledger.step, batches.following)
    if servers is not None:
        assert isinstance(learner, KerasLearner)
        if stream.rehearses and stream.output and learner.missing():
            session.warn(learner.missing())
    checkpoints = of_job(config, session, learner, stream.run_id, servers)
    warm_start = warm_start_of_job(config, model, learner, session.began_with, servers)
    if warm_start is not None and stream.rehearses:
        own, _ = checkpoints.newest(batches.layout) if checkpoints else (0, None)
        if not own:
            seconds = config.elastic.startup_timeout_seconds / 2
            # Now, and not when all are there.
            tried_again(warm_start.check, seconds, session.warn, lambda: session.stopped)

    begin = warm_start.begin if warm_start is not None else None
    if memory is not None:
        memory.open(stream.run_id, learner.fingerprint(), [len(part) for part in learner.parts()])
    doing.now(f"{name}: callbacks()")
    callbacks = callbacks_of(config, module, learner, batches.steps, watchdog.watch, warn)
    parts = (
        config, session, ring, learner, batches, report, export,
        checkpoints, begin, evaluation, callbacks, history, memory, export.keep,
    )  # fmt: skip
    worker: Worker = (
        Worker(*parts, servers, computing) if async_loop is None else ServedWorker(async_loop, *parts)
    )
    worker.sample_loss = sample_loss
    return worker


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
    """How the ring evaluates the model; None: there is nothing that it could be evaluated on, or with."""
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
    except Exception as error:  # the rehearsal tells it, of which one worker is in charge
        log.warning(f"the ring does not evaluate the model: {described(error)}")
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
    """Those of the user's module; None: it has none that are to be called.

    Raises:
        ModelError: one of them cannot be honoured.
    """
    given = accepted(module.callbacks(), config, notify) if module.callbacks is not None else []
    epochs = config.training.epochs
    return Callbacks(given, learner, steps.per_epoch, epochs, watch) if given and steps.records else None


class Doing:
    """Names what a worker does before it is ready, for the case that it hangs there."""

    def __init__(self) -> None:
        self._now = ""

    def now(self, what: str) -> None:
        self._now = what

    def words(self) -> str:
        return self._now


def _hung(stream: MasterStream, why: str, stack: str) -> None:
    """Report that a call of the user's code does not return, and end the process, which alone can end the
    call."""
    print(f"edl worker {stream.session.worker}: {why}", file=sys.stderr, flush=True)
    stream.session.say(failed=pb.Failed(why=why, traceback=stack))
    _abandon(stream)


def _abandon(stream: MasterStream) -> NoReturn:
    """End this process, whose main thread does not."""
    stream.close()
    end_children()
    leave(WorkerExit.FAILED)
