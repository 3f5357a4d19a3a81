"""A worker, put together from what the job's values and the user's module say; and its warm-up.

Importing this module takes seconds: TensorFlow and Horovod. So the master is greeted before.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol

import keras
import tensorflow as tf

from edl import config as config_module
from edl.config import Config
from edl.contract import modes
from edl.contract.evaluation import FINAL
from edl.contract.exit_codes import WorkerExit
from edl.contract.proto import edl_pb2 as pb
from edl.contract.steps import Steps
from edl.errors import ModelError, UserCodeError
from edl.layers.embedding import Embedding, keep_rows_elsewhere, saved_tables
from trainer import output_lock, user_model
from trainer.build_frozen import build_frozen
from trainer.callback_rules import accepted
from trainer.callbacks import Callbacks
from trainer.checkpointing import of_job
from trainer.data import Batch, Batches
from trainer.evaluation import RingEvaluation
from trainer.evaluation_metrics import EvaluationMetrics
from trainer.export import Exporter
from trainer.exports.verification import Ahead, Verification
from trainer.graphs import keep_xla_explicit
from trainer.history import HistoryFiles, as_json
from trainer.last_words import described
from trainer.learner import KerasLearner
from trainer.log import log
from trainer.memory_copy import MemoryCopy
from trainer.model_support import has_own_step, refuse_unless_compiled
from trainer.overlapped_step import RingSums
from trainer.own_step import OwnStepLearner
from trainer.records import Records
from trainer.rehearsal import refuse_empty, rehearse
from trainer.replaced import replaced
from trainer.ring.base import Ring
from trainer.ring.horovod import HorovodRing
from trainer.served_learner import ServedLearner
from trainer.served_worker import ServedWorker
from trainer.server_link import Interrupt, Link, ServerLink
from trainer.servers import ParameterServers
from trainer.session.client import MasterStream
from trainer.step_servers import StepServers
from trainer.store_retry import tried_again
from trainer.stretch import Stretch
from trainer.telemetry import Telemetry
from trainer.termination import end_children, leave
from trainer.user_model import UserModel
from trainer.warm_start import of_job as warm_start_of_job
from trainer.warm_start import saved_counts
from trainer.warm_up import warm_up
from trainer.watchdog import STARTUP_TIMEOUT, Compute, Computing, Watch, Watchdog
from trainer.worker import Worker

MOST_TOLD = 1_000  # epochs of the history in the summary, which a ConfigMap has to hold
MEBIBYTE = 1 << 20
AHEAD = 0.25  # of the buffer: batches that are read ahead; the rest: open blocks
OWN_TIME = 0.95  # of the startup timeout: then the worker says what hangs, before the master gives it up
TRIED_RECORDS = 5  # to build, trace and try the model with: so that it divides into two unlike parts


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
    with watchdog.watch(doing.words, OWN_TIME * elastic.startup_timeout_seconds, STARTUP_TIMEOUT) as start:
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
    stretch = None
    if config.asynchronous:
        assert isinstance(servers, StepServers)
        stretch = Stretch(config, session, served, servers, batches, report, computing=computing)
        learner.use(stretch, lambda: worker.state.ledger.step)
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
    worker: Worker = Worker(*parts, servers, computing) if stretch is None else ServedWorker(stretch, *parts)
    worker.sample_loss = sample_loss
    return worker


def model_of(config: Config, module: UserModel, stream: MasterStream) -> keras.Model:
    """What model() returns, with large embeddings replaced where that is asked for.

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
    for line in told if stream.rehearses else ():  # one worker tells it for all
        stream.session.warn(line)
    return model


@contextmanager
def advised(config: Config, model: keras.Model) -> Iterator[None]:
    """Inside, a model that is refused says how to have its rows elsewhere than where nobody has asked for
    them to be.

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
def explained(module: UserModel, samples: Sequence[Batch], batch_size: int) -> Iterator[None]:
    """Inside, the model is used with its first records: what a library says of a usual mistake is explained.

    Raises:
        UserCodeError: with what is behind the error.
    """
    try:
        yield
    except (ValueError, TypeError, AttributeError, tf.errors.InvalidArgumentError) as error:
        where = "feed(records)" if module.feed else "the reader of data('train')"
        why = ""
        if samples and samples[0].y is None:
            why = f"{where} gives no labels, and the model's loss is computed without them"
        elif re.search(rf"\b{batch_size}\b", str(error)):
            why = (
                f"training.batchSize is {batch_size}, and a worker gets a part of each batch, with any "
                "number of records: the model must take the size from the batch (None, -1, ops.shape)"
            )
        if not why:
            raise
        raise UserCodeError(f"{module.name}: {why}: {described(error)}") from error


def servers_of(
    config: Config, stream: MasterStream, ring: Ring, learner: KerasLearner | OwnStepLearner
) -> ParameterServers | None:
    """Who has the rows of the model's tables, and is not waited for when the ring is cut; None: nobody.

    Raises:
        ModelError: it has some, and the model has no use for them.
    """
    if not config.servers:
        return None
    if isinstance(learner, OwnStepLearner):
        raise ModelError(
            f"mode is {config.mode}, and the model has its own train_step(): what that does with rows "
            "that are on servers, nobody knows. Take it out, or set mode=train"
        )
    if not learner.tables and learner.model.built:
        raise ModelError(
            f"mode is {config.mode}, and the model has no edl.layers.Embedding, so nothing of it would be on "
            "parameter servers: set mode=train, or ps.replaceEmbeddings, if it has a large "
            "keras.layers.Embedding"
        )
    return connected(config, stream, ring)


def connected(config: Config, stream: MasterStream, ring: Ring) -> ParameterServers:
    """Those of the job, which are not waited for when the ring is cut."""
    servers = ParameterServers.at(
        stream.servers, stream.token, stream.run_id, config.training.seed,
        config.ps.replicas, config.ps.timeout_seconds,
    )  # fmt: skip

    def cut() -> None:
        ring.cut()
        servers.cut()

    stream.session.cuts(cut)
    stream.session.waits = servers.waiting
    return servers


def served_learner_of(
    config: Config, model: Any, samples: Sequence[Batch], warn: Callable[[str], None]
) -> ServedLearner:
    """
    Raises:
        ModelError: the model cannot be trained with all weights on servers; the text says why.
    """
    refuse_unless_compiled(model)
    if has_own_step(model):
        raise ModelError(
            "mode is ps, and the model has its own train_step(): its gradients are applied there, and not on "
            "servers. Take it out, or set mode=train"
        )
    how = config.training
    sample = samples[0] if samples else None
    return ServedLearner(model, sample, samples[1:], how.inexact_loss, warn, how.accumulate_steps)


def step_servers_of(config: Config, stream: MasterStream, ring: Ring) -> StepServers:
    """Those that have all weights, and are not waited for when the ring is cut."""
    how, interrupt = config.ps, Interrupt()
    patience = None if how.replicas < 2 else how.timeout_seconds

    def connect(index: int, address: str) -> Link:
        return ServerLink(index, address, stream.token, interrupt, patience=patience)

    links = [connect(index, address) for index, address in enumerate(stream.servers)]
    servers = StepServers(
        links, stream.run_id, config.training.seed, interrupt,
        how.grads_to_wait, how.max_staleness, how.scale_rate_by_staleness, how.replicas, connect,
        stream.servers,
    )  # fmt: skip

    def cut() -> None:
        ring.cut()
        servers.cut()

    stream.session.cuts(cut)
    stream.session.waits = servers.waiting
    return servers


class Sums(Protocol):
    """What of a ring a learner is made with."""

    @property
    def in_graph(self) -> RingSums | None: ...

    def reduce(self, vector: Any) -> Any: ...


def learner_of(
    model: Any,
    samples: Sequence[Batch],
    ring: Sums,
    inexact: str,
    warn: Callable[[str], None],
    pieces: int = 1,
    compression: str = "none",
) -> KerasLearner | OwnStepLearner:
    """
    Args:
        samples: batches of real records; none when there are none.
        inexact, warn, pieces: see KerasLearner.
        compression: the type as which large gradients travel.

    Raises:
        ModelError: the model cannot be trained over a ring; the text says why.
    """
    refuse_unless_compiled(model)
    sample = samples[0] if samples else None
    wire = "float32" if compression == "none" else compression
    if ring.in_graph is not None and wire not in ring.in_graph.WIRES:
        raise ModelError(
            f"training.compression must be none or float16: the ring's engine, Gloo, cannot sum {wire}"
        )
    if has_own_step(model):
        if pieces > 1:
            raise ModelError("training.accumulateSteps must be 1 for a model with its own train_step()")
        if wire != "float32":
            raise ModelError("training.compression must be none for a model with its own train_step()")
        return OwnStepLearner(model, sample, ring.reduce, inexact, warn)
    return KerasLearner(model, sample, samples[1:], ring.reduce, inexact, warn, ring.in_graph, pieces, wire)


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
