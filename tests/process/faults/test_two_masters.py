# SPDX-License-Identifier: Apache-2.0
"""One master acts and a second one stands by: real processes of both, with workers that have a real session.

A worker is a process without a model (`session_worker`); the API is the small server's, and the Service a
proxy that leads to the pod with the label, as kube-proxy does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edl.kubernetes import pods
from edl.kubernetes.names import MASTER_PORT
from edl.net import tls
from tests.process.conftest import ROOT
from tests.support.jobs.session_worker import Told, check_terms, told_in
from tests.support.kubernetes.certificates import Authority
from tests.support.kubernetes.master import TOKEN
from tests.support.kubernetes.small_release import Release, until

pytestmark = pytest.mark.waits


def host() -> str:
    """An address of this machine that no other test uses."""
    return f"127.{random.randrange(1, 255)}.{random.randrange(255)}.{random.randrange(1, 255)}"


class Workers:
    """Processes of workers, and what they have obeyed."""

    def __init__(self, folder: Path, address: str):
        self._folder, self._address = folder, address
        self.environment = {"EDL_TOKEN": TOKEN, "PYTHONPATH": str(ROOT)}
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, *workers: int) -> None:
        environment = os.environ | self.environment
        for worker in workers:
            with (
                open(self._folder / f"worker-{worker}", "wb") as out,
                open(self._folder / "err", "ab") as err,
            ):
                words = [
                    sys.executable,
                    "-m",
                    "tests.support.jobs.session_worker",
                    self._address,
                    str(worker),
                ]
                self._processes.append(subprocess.Popen(words, stdout=out, stderr=err, env=environment))

    @property
    def living(self) -> int:
        return sum(process.poll() is None for process in self._processes)

    def told(self) -> list[Told]:
        return told_in(self._folder)

    def formed(self, size: int, term: int) -> list[Told]:
        """The orders of a master to form a ring of that size, or to train on in one."""
        ordered = [t for t in self.told() if t["what"] in ("form", "up") and t["term"] == term]
        return [t for t in ordered if len(t["members"]) == size]

    def kill(self, *workers: int) -> None:
        """These; all, if none are named."""
        for process in [self._processes[w] for w in workers] or self._processes:
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def service(release: Release) -> AsyncIterator[str]:
    """Where a Service of the masters would be: host:port."""

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, IndexError, KeyError):
            pod = release.server.objects["pods"][release.acting[0]]
            there = await asyncio.open_connection(pods.ip(pod), MASTER_PORT)
            await asyncio.gather(copy(reader, there[1]), copy(there[0], writer))
        writer.close()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(lead, "127.0.0.1", 0) as server:
        yield f"localhost:{server.sockets[0].getsockname()[1]}"


@pytest.fixture
async def workers(small_release: Release, tmp_path: Path) -> AsyncIterator[Workers]:
    async with service(small_release) as address:
        folder = tmp_path / "workers"
        folder.mkdir()
        found = Workers(folder, address)
        try:
            yield found
        finally:
            found.kill()
            print((folder / "err").read_text()[-3000:])


def speak_tls(release: Release, workers: Workers, folder: Path) -> None:
    """With a certificate for the Service, which does not lead to a master that stands by."""
    secret = Authority.new(folder / "authority").issue(folder / "tls", "localhost")
    release.environment = {tls.FOLDER: str(secret), "EDL_MASTER_ADDRESS": "localhost:1"}
    workers.environment[tls.AUTHORITY] = str(secret / tls.CA)


async def test_who_stands_by_takes_over_from_a_master_that_is_silent(
    small_release: Release, workers: Workers, tmp_path: Path
) -> None:
    speak_tls(small_release, workers, tmp_path)
    small_release.install("workers=2", "elastic.joinDelaySeconds=0")
    async with small_release.master("a", host()) as first:
        await until(lambda: small_release.pods == ["edl-worker-0", "edl-worker-1"])
        async with small_release.master("b", host()) as second:
            await until(lambda: "stands by" in second.log)
            assert second.pages.get("/readyz")[0] == 200
            assert (small_release.holder, small_release.acting) == ("a", ["a"])
            workers.start(0, 1)
            await until(lambda: workers.formed(2, 1))
            await until(
                lambda: {t["worker"] for t in workers.told() if t["what"] == "active_master"} == {0, 1}
            )
            first.process.suspend()
            stopped = time.monotonic()
            (form, *_) = await until(lambda: workers.formed(2, 2))
            assert form["at"] - stopped < 10
            print(f"ordered by the next master after {form['at'] - stopped:.2f} s")
            assert (small_release.holder, small_release.acting) == ("b", ["b"])
            assert workers.living == 2
            first.process.resume()
            await until(lambda: "superseded" in first.log)
            await until(lambda: "stands by" in first.log)
            # The same again with exchanged roles: now the first one is the standby.
            await until(lambda: workers.told()[-1]["what"] == "active_master")
            second.process.send_signal(signal.SIGKILL)
            await until(lambda: workers.formed(2, 3))
            assert workers.living == 2
            check_terms(workers.told())
            second.process.resume()


async def test_a_master_that_is_asked_to_end_hands_over_at_once(
    small_release: Release, workers: Workers
) -> None:
    small_release.install("workers=2", "elastic.joinDelaySeconds=0")
    async with small_release.master("b", host()) as second:
        await until(lambda: small_release.pods == ["edl-worker-0", "edl-worker-1"])
        workers.start(0, 1)
        await until(lambda: workers.formed(2, 1))
        async with small_release.master("c", host()) as third:
            await until(lambda: "stands by" in third.log)
            second.process.terminate()
            ended = time.monotonic()
            (form, *_) = await until(lambda: workers.formed(2, 2))
            print(f"ordered by the next master after {form['at'] - ended:.2f} s")
            assert "no master acts" in third.log, "it was given back"
            assert workers.living == 2
            check_terms(workers.told())


async def test_the_lease_is_renewed_only_while_another_master_is_there(small_release: Release) -> None:
    small_release.install("workers=0")
    server = small_release.server
    async with small_release.master("a", host()) as first:
        await until(lambda: small_release.acting == ["a"])
        await until(lambda: first.pages.get("/readyz")[0] == 200)
        await asyncio.sleep(2)  # for nothing to happen
        assert server.count()["patch", "leases"] == 1
        async with small_release.master("b", host()):
            await until(lambda: server.count()["patch", "leases"] > 3)
        server.drop("pods", "b")
        before = len(server.requests)
        await asyncio.sleep(2)
        assert server.count(before)["patch", "leases"] == 0


async def test_an_outage_of_the_api_does_not_stop_who_acts_while_another_one_vouches_for_it(
    small_release: Release, workers: Workers
) -> None:
    small_release.install("workers=2", "elastic.joinDelaySeconds=0", "elastic.heartbeatTimeoutSeconds=1")
    server = small_release.server
    async with small_release.master("a", host()) as first:
        await until(lambda: len(small_release.pods) == 2)
        async with small_release.master("b", host()) as second:
            await until(lambda: "stands by" in second.log)
            workers.start(0, 1)
            await until(lambda: workers.formed(2, 1))
            await until(lambda: "active_master" in {t["what"] for t in workers.told()})
            await server.down()
            await until(lambda: "API is unavailable" in first.log and "API is unavailable" in second.log)
            await asyncio.sleep(6)  # longer than a Lease counts
            workers.kill(1)
            await until(lambda: workers.formed(1, 1))
            second.process.suspend()
            since = time.monotonic()
            await asyncio.sleep(4)
            silent = [t for t in workers.told() if t["at"] > since + 3.5]
            assert not silent, "no master promises it the Lease"
            second.process.resume()
            await until(lambda: [t for t in workers.told() if t["at"] > since + 4])
            await server.up()
            check_terms(workers.told())
            assert small_release.holder == "a"
