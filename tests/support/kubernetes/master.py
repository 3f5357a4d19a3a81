# SPDX-License-Identifier: Apache-2.0
"""A master started as the chart starts it, but as a process of the test, with the API from a kubeconfig."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from edl.contract import artifacts

TOKEN = "a-token"


class Pages:
    """The pages at a master's metrics port, at host:port."""

    def __init__(self, address: str):
        self.address = address

    def get(self, path: str) -> tuple[int, str, str]:
        """Get a page from the metrics port: status (0 without an answer), content type and text."""
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=10) as answer:
                return answer.status, answer.headers["Content-Type"], answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers["Content-Type"], error.read().decode()
        except OSError:
            return 0, "", ""

    def metrics(self) -> dict[str, Metric]:
        """The metrics that Prometheus would read, by name."""
        return {m.name: m for m in text_string_to_metric_families(self.get("/metrics")[2])}

    def value(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples of that name that have those labels."""
        samples = (s for metric in self.metrics().values() for s in metric.samples if s.name == name)
        return sum(s.value for s in samples if labels.items() <= s.labels.items())


class MasterProcess:
    """A running master.

    Args:
        output: the directory of its output and its log.
    """

    def __init__(self, process: subprocess.Popen[bytes], output: Path, metrics: str):
        self.process, self._output, self.pages = psutil.Process(process.pid), output, Pages(metrics)

    @property
    def log(self) -> str:
        return (self._output / "log").read_text()

    @property
    def running(self) -> bool:
        return self.process.is_running() and self.process.status() != psutil.STATUS_ZOMBIE

    async def address(self, seconds: float = 30.0) -> str:
        """Wait until the master listens for workers, and return its host:port."""
        async with asyncio.timeout(seconds):
            while not (self._output / artifacts.CONTACT).exists():
                assert self.running, self.log
                await asyncio.sleep(0.02)
        return str(json.loads((self._output / artifacts.CONTACT).read_text())["address"])


def command(
    output: Path, namespace: str, env: Mapping[str, str], pod: str, listen: str, metrics: str
) -> tuple[list[str], dict[str, str]]:
    """The command that starts a master of the release edl, and its environment."""
    words = ["--backend", "kubernetes", "--output", str(output), "--metrics", metrics, "--listen", listen]
    return [sys.executable, "-m", "edl.master", *words], os.environ | {
        "EDL_NAMESPACE": namespace,
        "EDL_RELEASE": "edl",
        "EDL_FULLNAME": "edl",
        "POD_NAME": pod,
        "EDL_MASTER_ADDRESS": "nowhere:1",
        "EDL_TOKEN": TOKEN,
        **env,
    }


@contextmanager
def master(
    output: Path, namespace: str, env: Mapping[str, str], pod: str = "", listen: str = "127.0.0.1:0"
) -> Iterator[MasterProcess]:
    """Run a master of the release edl.

    Args:
        env: environment variables; KUBECONFIG must lead to the API.
        pod: the name of the master's pod.
        listen: host:port for workers.
    """
    output.mkdir(parents=True, exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        metrics = f"127.0.0.1:{free.getsockname()[1]}"
    words, env = command(output, namespace, env, pod, listen, metrics)
    with (
        open(output / "log", "ab") as log,
        subprocess.Popen(words, env=env, stdout=log, stderr=log) as process,
    ):
        try:
            yield MasterProcess(process, output, metrics)
        finally:
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()
