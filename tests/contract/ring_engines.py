# SPDX-License-Identifier: Apache-2.0
"""Members of rings that follow orders, and their rendezvous: on threads, or in processes with Horovod."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Protocol

from edl.contract import script_imports
from edl.trainer.ring.local import InProcessGroup, LocalRing
from edl.trainer.session.kvstore import KeyValueStore
from tests.contract.ring_member import serve

ROOT = Path(__file__).parents[2]
MEMBERS = 3
SECONDS = 120
ENDED = ""


class Member(ABC):
    """A member of a ring that follows orders."""

    def __init__(self) -> None:
        self.words: queue.SimpleQueue[str] = queue.SimpleQueue()

    @abstractmethod
    def do(self, order: str) -> None:
        """Send an order to the member; its answer arrives in `words`."""

    @abstractmethod
    def cut(self) -> None:
        """Cut the ring from a different thread than the one in the ring."""

    def says(self, word: str) -> str:
        """Wait for an answer that begins with `word`, and skip earlier answers."""
        while True:
            line = self.words.get(timeout=SECONDS)
            assert line != ENDED, f"the member ended, and never said {word!r}"
            if line.startswith(word):
                return line

    def does(self, order: str, word: str) -> str:
        self.do(order)
        return self.says(word)


class Engine(Protocol):
    """Members in one process or in several, and their rendezvous."""

    def members(self) -> list[Member]:
        """MEMBERS live members that are in no ring."""

    def rendezvous(self, members: list[Member]) -> None:
        """Prepare the rendezvous of these members for the next generation."""

    def call_off(self, members: list[Member]) -> None:
        """Cancel the generation; members that wait for it are notified."""

    def kill(self, member: Member) -> None: ...

    def close(self) -> None: ...


# --- threads


class LocalMember(Member):
    def __init__(self) -> None:
        super().__init__()
        self.ring = LocalRing()
        self.orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.alive = True
        self.thread = threading.Thread(target=serve, args=(self.ring, self.orders.get, self.words.put))
        self.thread.start()

    def do(self, order: str) -> None:
        self.orders.put(order)

    def cut(self) -> None:
        self.ring.cut()


class Local:
    def __init__(self) -> None:
        self._members = [LocalMember() for _ in range(MEMBERS)]

    def members(self) -> list[Member]:
        self._members = [m if m.alive else LocalMember() for m in self._members]
        return list(self._members)

    def rendezvous(self, members: list[Member]) -> None:
        group = InProcessGroup(len(members))
        for m in self._members:
            if m in members:
                m.ring.open(group)

    def call_off(self, members: list[Member]) -> None:
        for m in members:
            m.cut()

    def kill(self, member: Member) -> None:
        assert isinstance(member, LocalMember)
        member.alive = False
        if member.ring.group is not None:
            member.ring.group.cut("a member has died")
        member.do(ENDED)

    def close(self) -> None:
        for m in self._members:
            m.do(ENDED)
            m.thread.join(SECONDS)


# --- processes


class ProcessMember(Member):
    """A process that a fork server has started (ring_member.py). It exits at the end of its connection."""

    def __init__(self, connection: socket.socket):
        super().__init__()
        self._connection = connection
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.pid = int(self.says("here").split()[1])

    @property
    def is_alive(self) -> bool:
        return self._reader.is_alive()

    def _read(self) -> None:
        with self._connection.makefile() as lines:
            for line in lines:
                self.words.put(line.strip())
        self.words.put(ENDED)

    def stop(self) -> None:
        """Stop the process, which stays alive."""
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        if self.is_alive:
            os.kill(self.pid, signal.SIGKILL)
        self._reader.join(SECONDS)
        self._connection.close()

    def do(self, order: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # `says` fails
            self._connection.sendall(f"{order}\n".encode())

    def cut(self) -> None:
        self.do("cut")


class Horovod:
    """Processes with Horovod.

    Args:
        environment: variables of all members, beside those of this process.
    """

    def __init__(self, **environment: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._store = KeyValueStore(lambda *_: None)
        port = asyncio.run_coroutine_threadsafe(self._store.start(), self._loop).result()
        self._numbers = itertools.count()
        self._members: list[ProcessMember] = []
        self._folder = tempfile.TemporaryDirectory()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self._folder.name}/members")
        self._listener.listen()
        self._listener.settimeout(SECONDS)
        command = [sys.executable, "-m", "tests.contract.ring_member", str(port)]
        self._forks = subprocess.Popen(
            [*command, "--fork", self._listener.getsockname(), self._store.secret],
            stdin=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | environment,
        )

    def _start(self) -> ProcessMember:
        assert self._forks.stdin is not None
        self._forks.stdin.write(f"member-{next(self._numbers)}\n")
        self._forks.stdin.flush()
        return ProcessMember(self._listener.accept()[0])

    def members(self) -> list[Member]:
        alive = [m for m in self._members if m.is_alive]
        for m in self._members:
            if m not in alive:
                m.kill()  # closes its connection
        self._members = alive + [self._start() for _ in range(MEMBERS - len(alive))]
        return list(self._members)

    def rendezvous(self, members: list[Member]) -> None:
        self._loop.call_soon_threadsafe(self._store.open, next(self._numbers))

    def call_off(self, members: list[Member]) -> None:
        self._loop.call_soon_threadsafe(self._store.call_off)
        for m in members:
            m.cut()

    def kill(self, member: Member) -> None:
        assert isinstance(member, ProcessMember)
        member.kill()

    def close(self) -> None:
        for m in self._members:
            m.kill()
        self._forks.kill()
        self._forks.communicate()
        self._listener.close()
        self._folder.cleanup()
        asyncio.run_coroutine_threadsafe(self._store.close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


class Gloo(Horovod):
    """Processes with Horovod's engine, and without a framework, as those of a script."""

    def __init__(self) -> None:
        super().__init__(**{script_imports.VARIABLE: ""})


class HorovodOverNccl(Horovod):
    """Processes whose Horovod sums over the stand-in for NCCL (tools/nccl_standin)."""

    def __init__(self) -> None:
        build = [str(ROOT / "tools/nccl_standin/build"), sys.executable]
        horovod = subprocess.check_output(build, text=True).strip()
        self._orders = tempfile.TemporaryDirectory()
        paths = os.pathsep.join(filter(None, [horovod, os.environ.get("PYTHONPATH")]))
        super().__init__(PYTHONPATH=paths, NCCL_STANDIN_ORDERS=self._orders.name)

    def order(self, member: Member, what: str) -> Path:
        """Make one operation of the member fail or hang, as standin.cc says.

        Returns the order's file. It is gone when the member has obeyed (`obeyed`).
        """
        assert isinstance(member, ProcessMember)
        order = Path(self._orders.name, f"{member.pid}.{what}")
        order.touch()
        return order

    def ends(self, member: Member) -> list[str]:
        """How the communicators of the member have ended since the last call."""
        assert isinstance(member, ProcessMember)
        ended = Path(self._orders.name, f"{member.pid}.ended")
        if not ended.exists():
            return []
        said = ended.read_text().split()
        ended.unlink()
        return said

    def close(self) -> None:
        super().close()
        self._orders.cleanup()


def obeyed(order: Path) -> None:
    """Wait until a member has obeyed this order."""
    deadline = time.monotonic() + SECONDS
    while order.exists():
        assert time.monotonic() < deadline, f"the order was not obeyed: {order.suffix}"
        time.sleep(0.005)


# --- rings


def form(engine: Engine, members: list[Member]) -> None:
    """Form a ring of these members, in this order."""
    engine.rendezvous(members)
    for rank, m in enumerate(members):
        m.do(f"form {rank} {len(members)}")
    for m in members:
        m.says("formed")


def leave(members: list[Member]) -> None:
    for m in members:
        m.do("close")
    for m in members:
        m.says("closed")


def all_do(members: list[Member], orders: list[str], word: str) -> list[str]:
    for m, order in zip(members, orders, strict=True):
        m.do(order)
    return [m.says(word) for m in members]
