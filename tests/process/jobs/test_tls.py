# SPDX-License-Identifier: Apache-2.0
"""TLS between the master and its callers: real certificates, real connections; what is said if it fails."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from edl.contract import artifacts
from edl.contract.tokens import Tokens, for_reading
from edl.errors import EdlError, MasterUnavailable
from edl.master.rpc.server import MasterServer
from edl.net import listener, tls
from edl.net.listener import Listener
from edl.net.master_client import Client
from edl.net.probe import probe
from edl.rows.client import Client as Reader
from tests.process.jobs.test_rpc import Idle
from tests.process.jobs.test_saved import A_Job
from tests.process.kubernetes.test_probe import a_master_without_workers
from tests.support.kubernetes.certificates import Authority
from tests.support.kubernetes.small_release import until
from tests.support.ps.rows import saved_rows

pytestmark = pytest.mark.waits


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.new(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def secret(authority: Authority, tmp_path: Path) -> Path:
    return authority.issue(tmp_path / "secret", "localhost", "127.0.0.1")


def contact(port: int, ca: object = "") -> artifacts.Contact:
    return artifacts.Contact(f"localhost:{port}", "a-token", 0, str(ca))


@asynccontextmanager
async def serving(certificate: tls.Certificate | None) -> AsyncIterator[int]:
    server = MasterServer(Idle(), Listener(Tokens("a-token"), certificate), "{}", "")
    port = await server.start("localhost:0")
    try:
        yield port
    finally:
        await server.close()


async def status(port: int, ca: object = "") -> str:
    """The phase that a command prints, or its error."""
    try:
        return str((await asyncio.to_thread(Client(contact(port, ca)).status))["phase"])
    except EdlError as error:
        return str(error)


def of(secret: Path, told: list[str], name: str = "localhost") -> tls.Certificate:
    return tls.Certificate(secret, name, told.append)


async def test_another_certificate_is_used_without_a_restart(
    authority: Authority, secret: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(listener, "CERTIFICATE_SECONDS", 0.05)
    told: list[str] = []
    first = (secret / "ca.crt").rename(tmp_path / "first")
    (secret / "ca.crt").write_bytes(first.read_bytes())
    async with serving(of(secret, told)) as port:
        assert await status(port, first) == "Starting"
        other = Authority.new(tmp_path / "other")
        other.issue(secret, "localhost")
        async with asyncio.timeout(20):
            while await status(port, secret / "ca.crt") != "Starting":
                await asyncio.sleep(0.05)
        assert "its certificate is not accepted: " in await status(port, first)
        (secret / "tls.key").write_text("nonsense")  # is reported, and changes nothing
        await until(lambda: told)
        assert "tls.crt and tls.key are not a certificate and its key" in told[0]
        assert told[0].endswith("the last certificate stays in use")
        assert await status(port, secret / "ca.crt") == "Starting"
        other.issue(secret, "localhost")
        await until(lambda: told[-1] == "")


async def test_each_end_says_when_only_one_of_them_speaks_tls(secret: Path) -> None:
    async with serving(of(secret, [])) as port:
        assert "it speaks TLS: set EDL_TLS_CA" in await status(port)
    async with serving(None) as port:
        assert "it does not speak TLS, and EDL_TLS_CA is set here" in await status(port, secret / "ca.crt")
    assert "it has exited or cannot be reached" in await status(port, secret / "ca.crt")
    assert "it has exited or cannot be reached" in await status(port)


@pytest.mark.parametrize(
    ("names", "days", "said"),
    [
        (("localhost",), -1, "certificate has expired"),
        (("edl-master.default.svc",), 1, "certificate is not valid for 'localhost'"),
    ],
)
async def test_a_certificate_that_nobody_accepts_is_told_on_both_ends(
    authority: Authority, tmp_path: Path, names: tuple[str, ...], days: int, said: str
) -> None:
    told: list[str] = []
    secret = authority.issue(tmp_path / "secret", *names, days=days)
    async with serving(of(secret, told)) as port:
        assert said in await status(port, secret / "ca.crt")
        await until(lambda: told)
        assert said in told[0]
        assert "callers at localhost will not accept" in told[0]


def test_what_is_no_certificate_is_named_before_anything_listens(secret: Path) -> None:
    certificate = of(secret, [])
    (secret / "tls.key").unlink()
    with pytest.raises(EdlError, match=r"tls\.key: cannot read: No such file"):
        certificate.credentials()
    with pytest.raises(EdlError, match=r"nowhere: cannot read: No such file"):
        Client(contact(1, "nowhere"))


@contextmanager
def environment(monkeypatch: pytest.MonkeyPatch, **variables: object) -> Iterator[None]:
    with monkeypatch.context() as patched:
        for name, value in variables.items():
            patched.setenv(name, str(value))
        yield


def test_a_master_of_this_machine_speaks_tls_if_its_environment_says_so(
    secret: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        environment(monkeypatch, EDL_TLS_DIRECTORY=secret),
        a_master_without_workers(tmp_path, "workers=0") as there,
        environment(monkeypatch, EDL_TLS_DIRECTORY=""),
    ):
        assert there.ca == str(secret / "ca.crt")
        assert Client(there).status()["phase"] == "Suspended"
        with environment(monkeypatch, EDL_TLS_CA=there.ca):
            assert "the job is Suspended" in probe(there.address, there.token, 5)
        with pytest.raises(MasterUnavailable, match="it speaks TLS"):
            Client(artifacts.Contact(there.address, there.token, 0)).status()


async def test_a_certificate_that_nobody_accepts_is_a_part_of_the_job_that_is_degraded(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = authority.issue(tmp_path / "secret", "elsewhere")
    with (
        environment(monkeypatch, EDL_TLS_DIRECTORY=secret),
        a_master_without_workers(tmp_path, "workers=0") as there,
    ):
        journal = tmp_path / "job" / artifacts.JOURNAL
        await until(lambda: "TLS: callers at 127.0.0.1 will not accept" in journal.read_text())
        authority.issue(secret, "127.0.0.1")
        await until(lambda: "TLS works again" in journal.read_text())
        assert Client(there).status()["phase"] == "Suspended"


async def test_a_worker_that_does_not_trust_the_master_says_why(secret: Path, tmp_path: Path) -> None:
    other = Authority.new(tmp_path / "other").folder
    code = (
        "import sys, trainer.session.client as c\n"
        "stream = c.MasterStream(sys.argv[1], 'a-token', 0, '')\n"
        "try: stream.open(1.0)\n"
        "except c.NoMaster as error: sys.exit(str(error))\n"
    )
    async with serving(of(secret, [])) as port:

        async def says(ca: object) -> str:
            worker = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                code,
                f"localhost:{port}",
                env={**os.environ, "EDL_TLS_CA": str(ca)},
                stderr=asyncio.subprocess.PIPE,
            )
            said = (await worker.communicate())[1].decode()
            return f"{worker.returncode}: {said}"

        assert await says(secret / "ca.crt") == "0: "
        assert "its certificate is not accepted: " in await says(other / "ca.crt")
        assert "it speaks TLS: set EDL_TLS_CA" in await says("")


@pytest.mark.process
async def test_parameter_servers_speak_tls_with_workers_master_and_readers(
    a_job: A_Job, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = authority.issue(tmp_path / "secret", "127.0.0.1")
    monkeypatch.setenv(tls.FOLDER, str(secret))
    sets = "mode=hybrid", "ps.servers=2", "evaluation.epochs=0"
    async with a_job(*sets, workers=1, records=400, epochs=2, model="counting_rows.py") as job:
        await job.ring_of(1)
        await job.until(lambda: all(server["rows"] for server in job.status["servers"]))
        addresses = [server["address"] for server in job.status["servers"]]
        with Reader(addresses, for_reading("a-token"), ca=secret / tls.CA, timeout=60) as reader:
            assert (await asyncio.to_thread(reader.changed, "counts")).step
        other = Authority.new(tmp_path / "other").folder / tls.CA
        for ca, said in (("", f"speaks TLS: set {tls.AUTHORITY}"), (other, "certificate is not accepted")):
            with (
                Reader(addresses, for_reading("a-token"), ca=ca, timeout=0.5) as reader,
                pytest.raises(EdlError, match=said),
            ):
                await asyncio.to_thread(reader.tables)
        summary = await job.end()
    assert summary["phase"] == "Succeeded", summary
    ids, rows = saved_rows(job.output / artifacts.MODEL)
    assert len(ids) == 400 and (rows == 2).all()
