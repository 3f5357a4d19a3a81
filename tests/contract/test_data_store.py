# SPDX-License-Identifier: Apache-2.0
"""Files of data in an S3 store: found, read by range despite faults, and refused when an object changes."""

from __future__ import annotations

import io
import logging
import re
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet as pa_parquet

import edl
from edl.data.formats.tfrecord_file import checksum
from edl.errors import DataError
from tests.support.checkpoints.s3 import Account, serving


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Account]:
    with serving() as account, pytest.MonkeyPatch.context() as patch:
        for name, value in account.variables.items():
            patch.setenv(name, value)
        patch.setenv("EDL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield account


def put(account: Account, name: str, data: bytes) -> None:
    client, path = fsspec.core.url_to_fs(f"{account.url}/{name}")
    client.pipe_file(path, data)


def test_files_of_a_bucket_are_one_reader(account: Account) -> None:
    for nth in range(3):
        rows = "".join(f"{n},{n / 2}\n" for n in range(nth * 100, nth * 100 + 100))
        put(account, f"d/{nth}.csv", f"a,b\n{rows}".encode())
    for address in ("d", "d/", "d/*.csv"):
        x, y = edl.csv(f"{account.url}/{address}", features="a", label="b").read(199, 201)
        assert (x.tolist(), y.tolist()) == ([199, 200], [99.5, 100.0])
    table = io.BytesIO()
    pa_parquet.write_table(pyarrow.table({"a": np.arange(300)}), table, row_group_size=100)
    put(account, "p/x.parquet", table.getvalue())
    found = edl.open_files(f"{account.url}/p").read(95, 105)
    assert found["a"].tolist() == list(range(95, 105))
    for missing, why in (("none", "there is no such file"), ("none/*.csv", "no file matches this pattern")):
        with pytest.raises(DataError, match=why):
            edl.csv(f"{account.url}/{missing}")


def test_an_object_that_is_replaced_is_told_by_its_etag(account: Account, tmp_path: Path) -> None:
    for value in (0, 1):
        np.save(tmp_path / f"{value}.npy", np.full(1000, value))
    put(account, "x.npy", (tmp_path / "0.npy").read_bytes())
    reader = edl.npy(f"{account.url}/x.npy")
    assert reader.read(5, 8).tolist() == [0, 0, 0]
    put(account, "x.npy", (tmp_path / "1.npy").read_bytes())  # of the same length
    with pytest.raises(DataError, match=r"x\.npy: records 5 to 7: the file was changed or replaced"):
        reader.read(5, 8)


class Faults:
    """A server before the S3 server that passes bytes on, with faults that are ordered.

    Args:
        endpoint: the address of the S3 server.
    """

    def __init__(self, endpoint: str):
        host, port = endpoint.removeprefix("http://").split(":")
        self._behind = host, int(port)
        self.orders: list[str] = []  # for the next GET of an object, one each
        faults = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                faults.answer(self.rfile, self.wfile)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, request: Any, answer: Any) -> None:
        """Pass one request on, and close the connection."""
        head = b""
        while (line := request.readline()) not in (b"\r\n", b""):
            head += line if not line.lower().startswith(b"connection:") else b""
        if not head:
            return
        length = re.search(rb"(?i)content-length: (\d+)", head)
        body = request.read(int(length[1])) if length else b""
        order = self.orders.pop(0) if self.orders and b"\r\nrange:" in head.lower() else ""
        if order == "503":
            slow = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
            answer.write(
                b"HTTP/1.1 503 Slow Down\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(slow)
            )
            answer.write(slow)
            return
        with socket.create_connection(self._behind) as behind:
            behind.sendall(head + b"Connection: close\r\n\r\n" + body)
            with behind.makefile("rb") as said:
                found = said.read()
        if order == "truncated":
            found = found[:-40]
        elif order == "slow":
            answer.write(found[:-40])
            answer.flush()
            time.sleep(0.5)
            found = found[-40:]
        answer.write(found)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def framed(record: bytes) -> bytes:
    """A record of a TFRecord file."""
    length = struct.pack("<Q", len(record))
    return length + struct.pack("<I", checksum(length)) + record + struct.pack("<I", checksum(record))


@pytest.mark.parametrize("fault", ["503", "truncated", "slow"])
def test_a_store_with_faults_loses_and_doubles_nothing(
    account: Account,
    fault: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    put(account, "f.tfrecord", b"".join(framed(f"record {n}".encode()) for n in range(200)))
    faults = Faults(account.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", faults.endpoint)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        reader = edl.tfrecord(f"{account.url}/f.tfrecord", raw=True)
        found = []
        for start in range(0, 200, 50):
            # The client itself repeats a few.
            faults.orders = [fault] * (12 if fault == "503" and not start else 1)
            found += reader.read(start, start + 50).tolist()
            assert not faults.orders
    finally:
        faults.close()
        fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert found == [f"record {n}".encode() for n in range(200)]
    if fault == "503":
        assert "f.tfrecord: the store does not answer, next attempt in 0.5 s" in caplog.text


class Renewal(logging.Handler):
    """Writes the file of credentials as soon as the store has refused the old ones."""

    def __init__(self, path: Path, account: Account):
        super().__init__()
        self._path, self._account = path, account

    def emit(self, record: logging.LogRecord) -> None:
        if "refuses the credentials" in record.getMessage():
            write_credentials(self._path, self._account)


def write_credentials(path: Path, account: Account) -> None:
    path.write_text(
        f"[default]\naws_access_key_id = {account.key}\naws_secret_access_key = {account.secret}\n"
    )


def test_credentials_that_are_replaced_while_a_job_reads_are_read_anew(
    account: Account, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "x.npy", np.arange(100))
    put(account, "renewed.npy", (tmp_path / "x.npy").read_bytes())
    old, path = account.without("DeleteObject"), tmp_path / "credentials"
    write_credentials(path, old)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(path))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    renewal = Renewal(path, account)
    logging.getLogger("edl.data").addHandler(renewal)
    try:
        reader = edl.npy(f"{account.url}/renewed.npy")
        assert reader.read(0, 2).tolist() == [0, 1]
        old.revoke()
        assert reader.read(5, 8).tolist() == [5, 6, 7]
        monkeypatch.setattr("edl.data.files.addresses.PATIENCE", 0.1)
        write_credentials(path, account.forged)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        logging.getLogger("edl.data").removeHandler(renewal)
        with pytest.raises(DataError, match=r"renewed\.npy: records 5 to 7: cannot be read"):
            reader.read(5, 8)
    finally:
        logging.getLogger("edl.data").removeHandler(renewal)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
