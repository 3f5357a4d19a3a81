# SPDX-License-Identifier: Apache-2.0
"""What is logged, by the job's logLevel, and how a line looks: in a process of its own."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys

import aiohttp
import pytest

from edl.trainer.session.kvstore import KeyValueStore

CODE = """
import logging, os, sys
from edl.trainer.runtime import log
log.follow(sys.argv[1])
log.log.info("loss 0.5")
log.log.warning("mixed records")
logging.getLogger("my.model").debug("shapes")
logging.getLogger("my.model").warning("odd data")
print(os.environ.get("TF_CPP_MIN_LOG_LEVEL"), file=sys.stderr)
log.follow('{"logLevel": "info"}')
logging.info("again")
"""

TIME = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z ", re.MULTILINE)


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        (
            "debug",
            [
                "the log level is debug",
                "loss 0.5",
                "mixed records",
                "DEBUG my.model: shapes",
                "WARNING my.model: odd data",
                "0",
            ],
        ),
        ("info", ["loss 0.5", "mixed records", "WARNING my.model: odd data", "2"]),
        ("warning", ["mixed records", "WARNING my.model: odd data", "2"]),
        ("error", ["2"]),
    ],
)
def test_the_values_say_what_a_worker_logs(
    level: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    command = [sys.executable, "-c", CODE, json.dumps({"logLevel": level})]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    logged = [TIME.sub("", line) for line in done.stderr.splitlines()]
    assert logged == [*lines, "INFO root: again"]
    assert len(TIME.findall(done.stderr)) == len(logged) - 1, "all but the one that print() has written"


def test_a_line_of_the_master_and_the_servers_begins_with_the_same_full_time() -> None:
    code = (
        "import structlog; from edl import log; log.log_at('info'); structlog.get_logger().info('\x1b[2Jx')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert TIME.sub("", done.stderr) == "[info     ] \\x1b[2Jx\n" != done.stderr


async def test_a_ring_that_forms_is_not_a_line_for_each_call_of_its_members(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = KeyValueStore(lambda *_: None)
    port = await store.start()
    store.open(1)
    with caplog.at_level(logging.INFO):
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            path = f"/{store.secret}/global/0"
            assert (await session.put(path, data=b"address")).status == 200
            assert await (await session.get(path)).read() == b"address"
        await store.close()
    assert caplog.messages == []
