"""The worker's session with its master: what it was told, what it has said, what is still to be done.

`Session` lies between the main thread, which trains, and the stream, which hears and speaks at any
time (trainer/session/client.py). It has no thread, socket or clock of its own: what waits is a `Bell`, and
messages go out through `send`. So the simulator runs the same session in virtual time. (`say_saved` alone
waits for itself; saving takes real time anyhow.)

`SessionState` is the part that outlives a master: the next one is told it when it takes over.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Protocol

import edl
from edl.contract.heartbeats import ServerWait, Staleness
from edl.contract.layout import Layout
from edl.contract.proto import edl_pb2 as pb
from edl.errors import EdlError, UserCodeError
from edl.trainer.runtime import error_report
from edl.trainer.session.orders import End, Export, FormRing, Order, WriteCheckpoint

NO_GENERATION = -1
NOTED_SECONDS = 5.0


class SessionState:
    """What a master knows of this worker: the last ring it was ordered into, and how that went."""

    def __init__(self) -> None:
        self.generation = 0
        self._members: tuple[int, ...] = ()
        self._ready: pb.Ready | None = None
        self._up, self._left = False, False
        self._out: pb.LeftRing | None = None

    @property
    def ready(self) -> bool:
        """Whether it has said that it is; else there is nothing to tell."""
        return self._ready is not None

    def form(self, generation: int, members: tuple[int, ...], distrusted: int = 0) -> None:
        """It was ordered into this ring.

        Args:
            distrusted: a state of this ring, or of one before, counts no longer.
        """
        if distrusted and self.generation <= distrusted:
            self._out = None
        self.generation, self._members, self._up, self._left = generation, members, False, False

    def is_inside(self, generation: int) -> bool:
        """Whether it was ordered into this ring last, and has not left it."""
        return generation == self.generation > 0 and not self._left

    def note(self, message: pb.FromWorker) -> None:
        """It said this, whether or not a master received it."""
        match message.WhichOneof("body"):
            case "ready":
                self._ready = message.ready
                if message.ready.HasField("held"):
                    self._out = message.ready.held
            case "joined_ring" if message.generation == self.generation:
                self._up = True
            case "left_ring":
                self._out, self._left = message.left_ring, message.generation == self.generation

    def resume(self) -> pb.Resume:
        """All of it, for the new master."""
        assert self._ready is not None
        ready = self._ready
        return pb.Resume(
            layout=ready.layout,
            model=ready.model,
            held_out=ready.held_out,
            forced=ready.forced,
            tables=ready.tables,
            sample_loss=ready.sample_loss if ready.HasField("sample_loss") else None,
            members=self._members,
            joined=self._up,
            left=self._left,
            left_ring=self._out,
        )


@dataclass(frozen=True, slots=True)
class EpochLoss:
    """The loss of the ring's steps in one epoch, as far as this worker was in the ring."""

    epoch: int  # from 0
    records: int = 0
    mean: float = 0.0  # over these records
    last: float = 0.0  # of the last step

    def after(self, loss: float, records: int) -> EpochLoss:
        """With one more step."""
        total = self.records + records
        return EpochLoss(self.epoch, total, self.mean + (loss - self.mean) * records / total, loss)

    def message(self) -> pb.EpochLoss:
        return pb.EpochLoss(epoch=self.epoch, records=self.records, mean=self.mean)


@dataclass(frozen=True, slots=True)
class Progress:
    """What the heartbeats tell. One value, replaced whole, so that a heartbeat never mixes two steps."""

    generation: int = 0
    step: int = 0
    records: int = 0  # trained by this worker in this ring, for its rate
    seconds: float = 0.0  # that they took to compute, for its speed
    loss: EpochLoss | None = None
    round: int = 0  # of the evaluation after that step
    staleness: Staleness | None = None


class Bell(Protocol):
    """Wakes the main thread; `threading.Event` is one."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def wait(self, timeout: float | None = None) -> object: ...


class Session:
    """What the main thread and the stream of one worker share.

    Args:
        worker: this worker's id, as far as it is known.
        send: takes each message, from any thread, and keeps the order.
        bell: the main thread waits for it.
    """

    def __init__(
        self,
        worker: int,
        send: Callable[[pb.FromWorker], None],
        bell: Bell,
    ):
        self.worker = worker
        self.state = SessionState()
        self.progress = Progress()
        self.stopped = False  # the master has ordered this worker to end
        self.waits: Callable[[], ServerWait | None] = lambda: None  # for which server, on any thread
        self.ended = ""  # why the stream has ended for good; empty while it has not
        self._send, self._bell = send, bell
        self._orders: deque[Order] = deque()
        self._tasks: deque[int] = deque()  # epochs to train, as changed since the ring was formed
        self._leave_generation = self._cut_generation = self._checkpoint_generation = NO_GENERATION
        self._commit: Callable[[pb.CommitCheckpoint], None] = lambda order: None
        self._cut: Callable[[], None] = lambda: None
        self._when_ended: Callable[[], None] = lambda: None
        self._noted = threading.Event()
        self._rate, self._memory = 0.0, 0  # as said last
        self._told_staleness: Staleness | None = None  # on this stream

    # --- the main thread's side

    def next_order(self) -> Order:
        """Wait for what to do next."""
        while not self._orders:
            self._bell.wait()
            self._bell.clear()
        return self._orders.popleft()

    @property
    def task(self) -> int | None:
        """The next change of the task that the ring has not made: up to how many epochs to train."""
        return self._tasks[0] if self._tasks else None

    def take_task(self) -> int:
        """The ring makes that change now."""
        return self._tasks.popleft()

    def must_leave(self, generation: int) -> bool:
        """Whether the master wants the members of `generation` to leave at a step boundary."""
        return self._leave_generation == generation

    def checkpoint_is_due(self, generation: int) -> bool:
        """Whether the master wants rank 0 of `generation` to have a checkpoint begun."""
        return self._checkpoint_generation == generation

    def checkpoint_begins(self) -> None:
        """That is done now."""
        self._checkpoint_generation = NO_GENERATION

    def say_saved(self, saved: pb.Saved, seconds: float = NOTED_SECONDS) -> None:
        """Tell where the model is kept, and wait until the master knows it: whoever dies of what comes next,
        the model is not trained again. A master that is out of reach is not waited for any longer."""
        self._noted.clear()
        self.say(saved=saved)
        self._noted.wait(seconds)

    def was_cut(self, generation: int) -> bool:
        return self._cut_generation == generation or self.stopped or bool(self.ended)

    # --- from any thread

    def say(self, generation: int = 0, **what: object) -> None:
        """Send one message, e.g. `say(g, joined_ring=pb.Up(step=3))`."""
        self._send(pb.FromWorker(generation=generation, **what))  # type: ignore[arg-type]

    def fail(self, error: BaseException, starting: bool = False) -> None:
        """Tell the master, once, why this worker cannot go on.

        Args:
            starting: it was not ready yet.
        """
        ours = isinstance(error, EdlError)  # then another worker would fare no better
        plain = ours and not isinstance(error, UserCodeError)  # the text says it all
        text = "" if plain else error_report.traced(error)
        why = error_report.described(error)
        if not plain and (where := error_report.located(error)):
            why = f"{why} ({where})"
        mistake = starting and not ours and error_report.comes_again(error)
        self.say(failed=pb.Failed(why=why, traceback=text, fatal=ours, mistake=mistake))

    def began_with(self, text: str) -> None:
        """Tell people with what the training begins."""
        self.say(warm_started=pb.WarmStarted(text=text))

    def warn(self, text: str) -> None:
        """Tell people something that does not stop this worker."""
        self.say(warned=pb.Warned(text=text))

    def break_ring(self) -> None:
        """Break the ring that this worker is in, and the calls of servers that it waits for."""
        self._cut()

    def cuts(self, cut: Callable[[], None]) -> None:
        """From now on a ring that is called off is cut with `cut`, which may be called from any thread."""
        self._cut = cut

    def commits(self, commit: Callable[[pb.CommitCheckpoint], None]) -> None:
        """From now on `commit`, which may be called from any thread, finishes checkpoints."""
        self._commit = commit

    def when_ended(self, act: Callable[[], None]) -> None:
        """From now on `act` is called, on any thread, when this worker is to end or has lost its master."""
        self._when_ended = act

    # --- the stream's side

    def greeting(self) -> list[pb.FromWorker]:
        """The first messages of a stream."""
        self._told_staleness = None
        hello = pb.Hello(worker=self.worker, version=edl.__version__, resumes=self.state.ready)
        messages = [pb.FromWorker(hello=hello)]
        if self.state.ready:
            messages.append(pb.FromWorker(generation=self.state.generation, resume=self.state.resume()))
        return messages

    def heartbeat(self, rate: float, memory: int) -> None:
        """Say how far the training is.

        Args:
            rate: records per second of this worker.
            memory: bytes resident.
        """
        self._rate, self._memory = rate, memory
        self.beat()

    def beat(self) -> None:
        """Say how far the training is now, and not a while later."""
        progress = self.progress
        speed = progress.records / progress.seconds if progress.seconds else 0.0
        beat = pb.Heartbeat(
            step=progress.step, round=progress.round, rate=self._rate, speed=speed, memory=self._memory
        )
        if (loss := progress.loss) is not None:
            beat.loss = loss.last
            beat.epoch_loss.CopyFrom(loss.message())
        staleness = progress.staleness
        if staleness is not None and staleness != self._told_staleness:
            self._told_staleness = staleness
            beat.staleness.CopyFrom(pb.Staleness(**asdict(staleness)))
        if (waits := self.waits()) is not None:
            beat.waits.CopyFrom(pb.ServerWait(**asdict(waits)))
        self.say(progress.generation, heartbeat=beat)

    def hear(self, message: pb.ToWorker) -> None:
        """An order of the master."""
        generation = message.generation
        match message.WhichOneof("body"):
            case "form":
                form = message.form
                members, shares = tuple(form.members), tuple(form.shares)
                layout = Layout(form.layout.records, form.layout.block, form.layout.shards)
                self.state.form(generation, members, form.distrusted)
                self._tasks.clear()  # what the ring is to do is in the order
                joining = tuple(form.joining)
                self._orders.append(
                    FormRing(
                        generation, members, form.root, form.sync, form.epochs, shares, layout,
                        form.step, joining, form.round, form.turn, form.servers, tuple(form.addresses),
                        form.distrusted, form.distrust,
                    )
                )  # fmt: skip
            case "train" if generation == self.state.generation:
                self._tasks.append(message.train.epochs)
            case "leave":
                self._leave_generation = generation
            case "cut":
                self._cut_generation = generation
                self._cut()
            case "checkpoint":
                self._checkpoint_generation = generation
            case "commit_checkpoint":
                self._commit(message.commit_checkpoint)
            case "write_checkpoint":
                self._orders.append(WriteCheckpoint())
            case "noted":
                self._noted.set()
            case "export":
                self._orders.append(Export())
            case "stop":
                self.stopped = True
                self._orders.clear()  # a master that took over may have ordered once more what is done now
                self._orders.append(End(message.stop.why))
                self._leave_generation = self.progress.generation
                self._cut()
                self._when_ended()
        self._bell.set()

    def end(self, why: str) -> None:
        """The stream has ended for good, and with it this worker's place in the job."""
        self.ended = why
        self._orders.append(End(why, lost=True))
        self._cut()
        self._when_ended()
        self._bell.set()
