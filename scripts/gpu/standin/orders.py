# SPDX-License-Identifier: Apache-2.0
"""Make members of a ring fail over the stand-in: all report it, none exits, and the next ring sums.

scripts/gpu/standin/run.sh python scripts/gpu/standin/orders.py
"""

import asyncio
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from edl.trainer.session.kvstore import KeyValueStore

ORDERS = Path(os.environ["FAKE_NCCL_ORDERS"])
ABORT_SECONDS = 0.5  # that the stand-in takes to abort a communicator


class Member:
    """A process of tests/contract/ring_member.py."""

    def __init__(self, number: int, rings: "Rings"):
        command = [
            sys.executable,
            "-m",
            "tests.contract.ring_member",
            str(rings.port),
            f"m-{number}",
            rings.store.secret,
        ]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put(None)

    def send(self, order: str) -> None:
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def wait_for(self, word: str, seconds: float = 20) -> str:
        """Return the next line that starts with the word."""
        deadline = time.time() + seconds
        while True:
            line = self._lines.get(timeout=max(0.1, deadline - time.time()))
            if line is None:
                raise RuntimeError(f"a member exited with {self.process.wait()}; expected {word!r}")
            if line.startswith(word):
                return line

    def fail(self, kind: str) -> None:
        """Make the next operation of this kind fail (init, call, async) or hang (finalize, destroy)."""
        (ORDERS / f"{self.process.pid}.{kind}").touch()


class Rings:
    """Members, and the store through which they form one ring after the other."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.store = KeyValueStore(lambda *_: None)
        self.port = asyncio.run_coroutine_threadsafe(self.store.start(), self._loop).result()
        self._generation = self._started = 0

    def start(self, count: int) -> list[Member]:
        members = [Member(self._started + n, self) for n in range(count)]
        self._started += count
        for member in members:
            member.wait_for("here", 90)
        return members

    def form(self, members: list[Member]) -> None:
        self._generation += 1
        self._loop.call_soon_threadsafe(self.store.open, self._generation)
        for rank, member in enumerate(members):
            member.send(f"form {rank} {len(members)}")
        for member in members:
            member.wait_for("formed")

    def check(self, members: list[Member]) -> None:
        """Form a ring, sum, and leave it without an abort, which takes half a second."""
        self.sum(members)
        took = self.close(members, members)
        if took >= ABORT_SECONDS:
            raise RuntimeError(f"an orderly shutdown took {took:.2f} s, expected less than {ABORT_SECONDS} s")

    def close(
        self, members: list[Member], survivors: list[Member], fault: Callable[[], object] | None = None
    ) -> float:
        """Have all members leave their ring, and return the seconds until the survivors have left it."""
        began = time.time()
        for member in members:
            member.send("close")
        if fault is not None:
            time.sleep(0.2)
            fault()
        for member in survivors:
            member.wait_for("closed")
        return time.time() - began

    def sum(self, members: list[Member]) -> None:
        """Form a ring and sum."""
        self.form(members)
        for member in members:
            member.send("sum 3 1")
        for member in members:
            found, expected = member.wait_for("sum"), f"sum {[float(len(members))] * 3}"
            if found != expected:
                raise RuntimeError(f"found {found!r}, expected {expected!r}")

    def break_shutdown(
        self,
        name: str,
        members: list[Member],
        victim: Member,
        kind: str,
        fault: Callable[[], object] | None,
        most: float,
    ) -> list[Member]:
        """Have the victim hang in an orderly shutdown, and possibly die of it. Return the survivors.

        Args:
            kind: where it hangs: finalize or destroy.
            most: seconds in which all survivors must have left the ring.
        """
        self.sum(members)
        victim.fail(kind)
        survivors = members if fault is None else [member for member in members if member is not victim]
        took = self.close(members, survivors, fault)
        print(f"{name} in {kind}: closed after {took:.2f} s", flush=True)
        if took > most:
            raise RuntimeError(f"a shutdown took {took:.2f} s, expected at most {most} s")
        self.check(survivors)
        return survivors

    def break_ring(
        self,
        name: str,
        members: list[Member],
        fault: Callable[[], object],
        survivors: list[Member],
        order: str = "sums",
        wait: bool = True,
    ) -> None:
        """Have members sum until the fault breaks their ring; then the survivors form the next one.

        Args:
            wait: whether the fault comes after a sum, or at once.
        """
        self.form(members)
        for member in members:
            member.send(order)
        if wait:
            members[0].wait_for("another")
        began = time.time()
        fault()
        errors = {member.wait_for("broken")[:110] for member in survivors}
        print(f"{name} ({order}): {time.time() - began:.2f} s; {sorted(errors)}", flush=True)
        self.check(survivors)


def stop_and_cut(stopped: Member, others: list[Member]) -> None:
    """Stop a member, and cut the ring of the others a second later, as the master does it."""
    os.kill(stopped.process.pid, signal.SIGSTOP)
    time.sleep(1)
    for member in others:
        member.send("cut")


def main() -> None:
    rings = Rings()
    members = rings.start(3)
    rings.check(members)
    for order in ("sums", "graphs"):
        for kind in ("async", "call"):
            for rank, member in enumerate(members):
                name = f"{kind} error of rank {rank}"
                rings.break_ring(name, members, lambda m=member, k=kind: m.fail(k), members, order)
    for rank in (0, 2):
        members[rank].fail("init")
        rings.break_ring(f"init error of rank {rank}", members, lambda: None, members, wait=False)
    for order in ("sums", "graphs"):  # the dead rank is silent: only Gloo's connections show its death
        rings.break_ring("kill -9", members, members[-1].process.kill, members[:-1], order)
        members = [*members[:-1], *rings.start(1)]
    others = [members[0], members[2]]
    rings.break_ring("SIGSTOP and a cut after 1 s", members, lambda: stop_and_cut(members[1], others), others)
    members[1].process.kill()

    # The third member does not sum, so there is no communicator yet when it dies.
    (third,) = rings.start(1)
    rings.form([*others, third])
    for member in others:
        member.send("sum 3 1")
    time.sleep(0.3)
    third.process.kill()
    for member in others:
        member.wait_for("broken")
    rings.check(others)

    for delay in (0.01, 0.04, 0.07, 0.10):  # a communicator takes 0.05 s
        (third,) = rings.start(1)

        def kill_late(third: Member = third, delay: float = delay) -> None:
            time.sleep(delay)
            third.process.kill()

        name = f"kill -9 {delay:.2f} s after the first sum began"
        rings.break_ring(name, [*others, third], kill_late, others, wait=False)

    members = [*others, *rings.start(1)]
    for victim in (members[0], members[2]):
        for kind in ("finalize", "destroy"):  # patch 14 waits two seconds
            rings.break_shutdown("a hang", members, victim, kind, None, 4.0)
    for kind in ("finalize", "destroy"):
        victim = members[-1]
        members = rings.break_shutdown("kill -9", members, victim, kind, victim.process.kill, 2.0)
        members.extend(rings.start(1))
        victim = members[-1]
        rest = members[:-1]
        fault = partial(stop_and_cut, victim, rest)
        members = rings.break_shutdown("SIGSTOP and a cut after 1 s", members, victim, kind, fault, 3.0)
        victim.process.kill()
        members.extend(rings.start(1))
    print("all passed", flush=True)
    for member in members:
        member.process.kill()


if __name__ == "__main__":
    try:
        main()
        code = 0
    except Exception as error:
        print(f"FAILED: {error!r}", flush=True)
        code = 1
    sys.stdout.flush()
    os._exit(code)  # the store's thread and members may still run
