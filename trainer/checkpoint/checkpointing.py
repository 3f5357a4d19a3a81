"""Checkpoints, from one worker's side: its part of each, and the state that a job goes on from.

The ring agrees on the step (`ready`: a field of the control vector). Right after it each rank takes the
values of its variables, without a copy, and has them written in the background while it trains on: `begin`.
Which variables are whose is arithmetic. The master hears of each part; when all are there, it has one of the
writers finish the checkpoint: `commit`. It may have left that ring by then.

    ready ──all ranks──▶ begin ──background──▶ CheckpointPart ... CommitCheckpoint ──▶ Checkpointed

With its part each rank says the digest of the whole state that it holds: a checkpoint of states that differ
is never finished. The digest is made in the background, too.

Where rows are on parameter servers, each of these has a part of its own, of the same step: rank 0 has all of
them take it before it goes on, and tells of it when they have written it.

Promise: nothing here changes the model, delays a step for longer than it takes to read the variables'
addresses, or ends the training: what fails is told, and the next checkpoint is another attempt.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

import edl
from edl.checkpoints import (
    SERVERS,
    Best,
    CheckpointError,
    Loaded,
    Manifest,
    Part,
    Store,
    Tensor,
    Variable,
    check_values,
    utc_now,
)
from edl.config import Config, lineage
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.contract.ranges import RangeSet
from edl.contract.steps import Steps
from edl.errors import DataError, ModelError
from edl.trainer.agreement.epochs import MEMORY, Epochs, without_memory
from edl.trainer.agreement.ledger import Ledger
from edl.trainer.model.digests import digest, drained
from edl.trainer.model.variable_spec import Described
from edl.trainer.ps_client.interfaces import PartNotWritten, PartsOfServers
from edl.trainer.ring.base import RingBroken
from edl.trainer.runtime.log import log
from edl.trainer.runtime.retry import tried_again
from edl.trainer.session.state import Session

T = TypeVar("T")
NICE = 10  # of the thread that writes
BOUNDARY = "boundary"  # of a manifest's state: the step of its ledger, where that is not the checkpoint's
KEPT = 2  # attempts that this worker can finish
TRIES = 3  # to write the last state, where servers go away meanwhile
BACK_SECONDS = 30.0  # that one may take to be there again
EPOCH_SHARE = 0.1  # of the interval: an epoch's end makes a checkpoint if the last one is as old


class Learner(Protocol):
    """What of a learner is in a checkpoint."""

    def described(self) -> list[Described]: ...

    def parts(self) -> list[np.ndarray]: ...

    def prepared(self, parts: list[np.ndarray]) -> Any: ...

    def take_over(self, values: Any) -> None: ...

    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class Place:
    """Of a worker in a ring."""

    generation: int
    first: int  # the worker of rank 0
    rank: int
    size: int


class Checkpointing:
    """The checkpoints of one worker.

    Args:
        store: where they lie.
        run_id: of the job.
        background: has work done beside the training, one piece after the other.
        servers: have a part each; None: there are none.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        learner: Learner,
        store: Store,
        run_id: str,
        background: Callable[[Callable[[], None]], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        servers: PartsOfServers | None = None,
    ):
        self._servers = servers
        self._config, self._session, self._learner, self._store = config, session, learner, store
        self._run_id, self._clock = run_id, clock
        self._background = background or ThreadPoolExecutor(1, "checkpoints", _give_way).submit
        self._model = ""  # the fingerprint, once it was asked for
        self.forced: tuple[str, ...] = ()  # what is another value than before a checkpoint, in words
        self._lock = threading.Lock()
        self._busy = 0  # pieces of work in the background that are not done
        self._begun_at = clock()  # the last one in which this worker took part
        self._restored: Manifest | None = None  # what it has begun from
        every = config.checkpoint
        self._best = Best(every.best, every.best_mode == "max") if every.best else None
        self._metrics: tuple[int, dict[str, float]] = 0, {}  # of the last epoch, and the step that ended it
        self._told = False  # that there is no such metric
        self._saves = 0
        self._keeps_all = False  # old ones could not be removed, as was told
        self._pending: dict[tuple[int, str], Manifest] = {}  # to be finished, but for their parts
        session.commits(self.commit)

    # --- writing

    @property
    def waits_for_evaluation(self) -> bool:
        """Whether a checkpoint of the end of an epoch is to say what its evaluation has found."""
        return self._best is not None and self._best.metric.startswith("val_")

    def ready(self, place: Place, step: int, steps: Steps, epochs: int, evaluated: bool = False) -> bool:
        """Whether this rank can take part in a checkpoint after the next step; of rank 0: and one is due.

        Args:
            step: how many there will be in the model.
            epochs: to train. The state that they end with is written by who saves the model.
            evaluated: it is that of the end of an epoch, after its evaluation.
        """
        if self._busy or steps.ended(step, epochs):
            return False
        asked = self._session.checkpoint_is_due(place.generation)
        return place.rank != 0 or evaluated or asked or self._is_due(step, steps)

    def _is_due(self, step: int, steps: Steps) -> bool:
        every = self._config.checkpoint
        if every.steps and step % every.steps == 0:
            return True
        old = self._clock() - self._begun_at >= EPOCH_SHARE * every.seconds
        return steps.ends_epoch(step) and (old or self._best is not None)

    def epoch_ended(self, step: int, metrics: dict[str, float], evaluated: bool = False) -> None:
        """With this step an epoch is whole: this is how good a checkpoint of it is."""
        self._metrics = step, metrics
        name = self._best.metric if self._best is not None else ""
        later = name.startswith("val_") and not evaluated
        if name and name not in metrics and not later and not self._told:
            self._told = True
            self._session.warn(
                f"checkpoint.best is {name!r}, and the metrics of an epoch are "
                f"{', '.join(metrics) or 'none'}: no checkpoint is the best one"
            )

    def begin(
        self, place: Place, ledger: Ledger, steps: Steps, layout: Layout, step: int | None = None
    ) -> None:
        """Have this rank's part of the present state written. All ranks begin at the same step.

        Args:
            step: of the checkpoint, where servers are further than the ledger (mode=ps); None: the ledger's.
        """
        self._begun_at = self._clock()
        self._session.checkpoint_begins()
        # A new master may count generations anew; workers are numbered once.
        attempt = f"{self._run_id}-g{place.generation}-w{place.first}"
        key, ours, finite, all_ = self._take(attempt, place, ledger, steps, layout, step)
        if not (compared := place.size > 1 and not self._config.asynchronous):
            all_.clear()  # nobody else holds the state, or the servers do
        told = ledger.exact()
        theirs = self._take_parts(key, place)

        def work() -> None:
            with theirs as written:
                state = digest(drained(all_), told) if compared else b""
                self._write(key, place, ours, finite, written, state)

        self._do(key, work)

    def save(self, ledger: Ledger, steps: Steps, layout: Layout, step: int | None = None) -> None:
        """Write a whole checkpoint of the present state, and return when it is there, or has failed. Args: as
        `begin`.

        For a state of which this worker alone is asked to take care: the last one of a training, or the last
        copy. No later one makes up for it, and nothing is trained meanwhile: a server that goes away is
        waited for, and all write their parts again.
        """
        at = ledger.step if step is None else step
        if (found := self._restored) is not None and at == found.step:
            self._session.say(checkpointed=_told(found))  # a new master may not know of it
            return
        place = Place(0, self._session.worker, 0, 1)
        for tries in range(1, TRIES + 1):
            self._saves += 1
            attempt = f"{self._run_id}-w{place.first}-alone{self._saves}"
            key, tensors, finite, _ = self._take(attempt, place, ledger, steps, layout, at)
            again = self._attempt(key, partial(self._save, key, tensors, finite, place, tries < TRIES))
            if not again:
                return

    def _save(
        self, key: tuple[int, str], tensors: dict[str, Tensor], finite: frozenset[str], place: Place,
        again: bool,
    ) -> bool:  # fmt: skip
        """Write a whole checkpoint.

        Args:
            again: it may be tried again.

        Returns:
            whether it is to be: a server went away before its part was written, and all answer now.
        """
        try:
            with self._take_parts(key, place) as theirs:
                part = self._store.begin(*key).write_part(0, 1 + self._of_servers(key), tensors, finite)
                parts = theirs()
        except PartNotWritten as error:
            assert self._servers is not None
            if not again or not self._servers.answer_within(BACK_SECONDS):
                raise
            log.warning(f"{error}; the checkpoint is written again")
            return True
        self._finish(key, self._whole(key, (part, *parts)))
        return False

    def _take(
        self, attempt: str, place: Place, ledger: Ledger, steps: Steps, layout: Layout, at: int | None
    ) -> tuple[tuple[int, str], dict[str, Tensor], frozenset[str], list[np.ndarray]]:
        """The state as it is now: what it takes to finish a checkpoint of it, this rank's part, what of
        that must be finite, and all values, uint8 [bytes] each."""
        described, parts = self._learner.described(), self._learner.parts()
        if memory := ledger.epochs.memory:
            described = [*described, Described(MEMORY, "uint8", (len(memory),))]
            parts = [*parts, np.frombuffer(memory, np.uint8)]
        parts_of = deal([part.nbytes for part in parts], place.size)
        variables = [
            Variable(d.name, d.dtype, d.shape, part) for d, part in zip(described, parts_of, strict=True)
        ]
        self._model = self._model or self._learner.fingerprint()
        step = ledger.step if at is None else at
        key = step, attempt
        of_servers = {} if self._servers is None else {SERVERS: {"count": self._servers.count, "parts": []}}
        self._pending[key] = Manifest(
            step=step, run=self._run_id, attempt=attempt,
            epoch=steps.epoch(step), records=steps.begins_at(step), model=self._model,
            variables=tuple(variables), parts=(), skipped=tuple(ledger.skipped), bad=dict(ledger.bad),
            config=lineage.kept(self._config), edl=edl.__version__,
            metrics=self._metrics[1] if self._metrics[0] == step else {},
            state={
                "layout": asdict(layout), "forced": list(self.forced), "epochs": ledger.epochs.described(),
                **of_servers, **({} if step == ledger.step else {BOUNDARY: ledger.step}),
            },
        )  # fmt: skip
        while len(self._pending) > KEPT:
            del self._pending[next(iter(self._pending))]
        ours = {
            v.name: Tensor(v.dtype, v.shape, part.data)
            for v, part in zip(variables, parts, strict=True)
            if v.part == place.rank
        }
        return key, ours, frozenset(d.name for d in described if d.weight and d.name in ours), parts

    def _take_parts(
        self, key: tuple[int, str], place: Place
    ) -> AbstractContextManager[Callable[[], Sequence[Part]]]:
        """Have the servers take their parts now, if that is for this rank to do. Returns: as of
        `PartsOfServers.take_parts`."""
        if self._servers is None or place.rank:
            return nullcontext[Callable[[], Sequence[Part]]](tuple)
        try:
            return self._servers.take_parts(*key, place.size)
        except CheckpointError as error:
            return nullcontext(partial(_fail, error))

    def _write(
        self,
        key: tuple[int, str],
        place: Place,
        tensors: dict[str, Tensor],
        finite: frozenset[str],
        theirs: Callable[[], Sequence[Part]],
        state: bytes,
    ) -> None:
        (step, attempt), of = key, place.size + self._of_servers(key)
        ours = self._store.begin(*key).write_part(place.rank, of, tensors, finite)
        for index, part in [(place.rank, ours), *enumerate(theirs(), place.size)]:
            self._session.say(
                place.generation,
                checkpoint_part=pb.CheckpointPart(
                    step=step, attempt=attempt, index=index, of=of,
                    name=part.name, nbytes=part.nbytes, sha256=bytes.fromhex(part.sha256), state=state,
                ),
            )  # fmt: skip

    def _of_servers(self, key: tuple[int, str]) -> int:
        """How many parts of servers it has: there may be others by the time when they are written."""
        pending = self._pending.get(key)
        return pending.state.get(SERVERS, {}).get("count", 0) if pending is not None else 0

    def _whole(self, key: tuple[int, str], parts: Sequence[Part]) -> Manifest:
        """With all parts, those of the servers last."""
        manifest = replace(self._pending[key], parts=tuple(parts))
        if self._servers is None:
            return manifest
        names = [part.name for part in parts[len(parts) - self._of_servers(key) :]]
        return replace(manifest, state={**manifest.state, SERVERS: {"count": len(names), "parts": names}})

    def commit(self, order: pb.CommitCheckpoint) -> None:
        """Finish a checkpoint, from any thread: all of its parts are written."""
        key = order.step, order.attempt
        if key in self._pending:
            manifest = self._whole(key, [Part(p.name, p.nbytes, p.sha256.hex()) for p in order.parts])
            self._do(key, lambda: self._finish(key, manifest))

    def _finish(self, key: tuple[int, str], manifest: Manifest) -> None:
        self._store.begin(*key).commit(replace(manifest, created=utc_now()))
        self._session.say(checkpointed=_told(manifest))
        if self._servers is not None:
            self._servers.committed(*key)
        self._prune()

    def _prune(self) -> None:
        """Remove old ones. That an account may not, or a store is away, makes the new one no worse."""
        try:
            self._store.prune(self._config.checkpoint.keep, self._best)
        except CheckpointError as error:
            if not self._keeps_all:
                self._session.warn(
                    f"old checkpoints are not removed, and take room: {error} (checkpoint.keep is "
                    f"{self._config.checkpoint.keep})"
                )
            self._keeps_all = True
        else:
            self._keeps_all = False

    def _do(self, key: tuple[int, str], work: Callable[[], None]) -> None:
        """In the background; a failure ends nothing but this attempt."""

        def beside() -> None:
            try:
                self._attempt(key, work)
            finally:
                with self._lock:
                    self._busy -= 1

        with self._lock:
            self._busy += 1
        self._background(beside)

    def _attempt(self, key: tuple[int, str], work: Callable[[], T]) -> T | None:
        """The result of the work; None if it failed, which the master is told."""
        try:
            return work()
        except Exception as error:  # also what a store's library raises that nobody has thought of
            said = isinstance(error, (CheckpointError, RingBroken))
            why = str(error) if said else f"{type(error).__name__}: {error}"
            failed = pb.CheckpointFailed(step=key[0], attempt=key[1], why=why)
            self._session.say(checkpoint_failed=failed)
            return None

    # --- reading

    @property
    def attempt(self) -> str:
        """Of the checkpoint that was restored last; empty: none was."""
        return self._restored.attempt if self._restored is not None else ""

    @property
    def whole(self) -> Iterator[tuple[int, str]]:
        """Step and attempt of those that are whole, the newest first.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return ((c.step, c.attempt) for c in reversed(self._store.checkpoints()) if not c.wrong())

    @property
    def restored_step(self) -> int:
        """Of the checkpoint that was restored last; 0: none was."""
        return self._restored.step if self._restored is not None else 0

    @property
    def restored_servers(self) -> int:
        """How many servers have a part of that one; 0: none has."""
        state = self._restored.state if self._restored is not None else {}
        return int(state.get(SERVERS, {}).get("count", 0))

    @property
    def known(self) -> int:
        """The step of the newest one that was completed, whole or not; 0: there is none.

        Raises:
            CheckpointError: the store cannot be read.
        """
        return max((c.step for c in self._store.checkpoints()), default=0)

    def newest(self, ours: Layout) -> tuple[int, Layout | None]:
        """The step of the newest checkpoint that this job could begin from, and its data's layout; 0: none.

        Args:
            ours: the data's layout, as this worker would have it.

        Raises:
            DataError: it is of other data.
            ConfigError: it is another run's, or of other values.
            ModelError: it is of another model.
            CheckpointError: the store cannot be read.
        """
        return self._patiently(lambda: self._newest(ours))

    def _newest(self, ours: Layout) -> tuple[int, Layout | None]:
        for checkpoint in reversed(self._store.checkpoints()):
            if not checkpoint.wrong():
                self._check(checkpoint.manifest)
                layout = Layout(**checkpoint.manifest.state["layout"])
                if layout.records != ours.records:
                    raise DataError(
                        f"the data have {ours.records:,} records, and the checkpoint of step "
                        f"{checkpoint.step:,} in {self._config.checkpoint.dir} was made with "
                        f"{layout.records:,}"
                    )
                return checkpoint.step, layout
        return 0, None

    def restore(self, expected: int) -> Ledger | None:
        """Take over the state of the newest whole checkpoint; None: there is none.

        Args:
            expected: the step of one that is known to have been written; 0: none is.

        Raises:
            CheckpointError: none is whole, though one is expected.
            others: as `newest`; nothing is changed then.
        """
        loaded: Loaded | None = self._patiently(lambda: self._store.load_newest(log.warning))
        if loaded is None and expected:
            raise CheckpointError(
                f"{self._config.checkpoint.dir}: the checkpoint of step {expected:,} was written, and none "
                "is whole now. Nothing is trained anew: bring them back and resume, or begin another job"
            )
        if loaded is None:
            return None
        manifest = loaded.checkpoint.manifest
        self._check(manifest)
        found = [np.frombuffer(loaded.tensors[v.name].data, np.uint8) for v in without_memory(manifest)]
        remembered = loaded.tensors.get(MEMORY)
        epochs = _epochs(manifest, b"" if remembered is None else bytes(remembered.data))
        loaded.tensors.clear()
        self._learner.take_over(self._learner.prepared(found))
        self._restored = manifest
        try:  # those that were passed over: the training that begins here is not theirs
            self._store.supersede(manifest.step)
        except CheckpointError as error:
            log.warning(str(error))
        epochs = epochs.going_on(self._config.training.epochs)
        step = int(manifest.state.get(BOUNDARY, manifest.step))
        return Ledger(step, RangeSet.of(manifest.skipped), dict(manifest.bad), epochs=epochs)

    def _patiently(self, read: Callable[[], T]) -> T:
        """What is read of the store, which may be away for a while: so long that it is told why this worker
        is not ready, and not only that it is not."""
        seconds = self._config.elastic.startup_timeout_seconds / 2
        return tried_again(read, seconds, self._session.warn, lambda: self._session.stopped)

    def _check(self, manifest: Manifest) -> None:
        where, step = self._config.checkpoint.dir, manifest.step
        forced = check_values(where, manifest, self._config, self._run_id)
        self._model = self._model or self._learner.fingerprint()
        theirs = [(v.dtype, v.shape) for v in without_memory(manifest)]
        ours = [(d.dtype, d.shape) for d in self._learner.described()]
        if manifest.model != self._model or theirs != ours:
            raise ModelError(
                f"the checkpoint of step {step:,} in {where} is of another model: its layers, variables, "
                "loss or optimizer differ from those of this one"
            )
        if (manifest.state.get(SERVERS) is None) != (self._servers is None):
            has, lacks = ("no rows", "has") if self._servers is not None else ("rows", "does not have")
            raise ModelError(
                f"the checkpoint of step {step:,} in {where} has {has} of parameter servers, and this job "
                f"{lacks} rows there: go on in the mode that it was made in"
            )
        self.forced = tuple(dict.fromkeys((*manifest.state.get("forced", ()), *forced)))


def _fail(error: CheckpointError) -> Sequence[Part]:
    raise error


def _told(manifest: Manifest) -> pb.Checkpointed:
    return pb.Checkpointed(step=manifest.step, attempt=manifest.attempt, nbytes=manifest.nbytes)


def _epochs(manifest: Manifest, memory: bytes) -> Epochs:
    """What the epochs before a checkpoint have given; an older edl has not written that."""
    described = manifest.state.get("epochs")
    return Epochs.unknown(manifest.epoch) if described is None else Epochs.of(described, memory)


def _give_way() -> None:
    """Where there are no cores to spare, the training has those that there are: Linux weighs each thread by
    itself."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def deal(sizes: Sequence[int], of: int) -> list[int]:
    """Which part each variable is in: the largest first, each into the part that is smallest so far. The same
    on every rank."""
    parts, full = [0] * len(sizes), [0] * of
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        parts[i] = min(range(of), key=lambda part: (full[part], part))
        full[parts[i]] += sizes[i]
    return parts


def of_job(
    config: Config, session: Session, learner: Any, run_id: str, servers: PartsOfServers | None = None
) -> Checkpointing | None:
    """The checkpoints of a worker; None: the job writes none.

    Args:
        servers: have a part of each; None: there are none.

    Raises:
        CheckpointError: their address is invalid.
    """
    if not (where := config.checkpoint.dir):
        return None
    return Checkpointing(config, session, learner, Store.open(where), run_id, servers=servers)
