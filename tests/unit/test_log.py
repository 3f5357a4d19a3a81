"""What a worker writes to its log, by the job's logLevel: in a process of its own, as a worker has it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import aiohttp
import pytest

from trainer.session.kvstore import KeyValueStore

CODE = """
import logging, os, sys
from trainer import log
log.follow(sys.argv[1])
log.log.info("loss 0.5")
log.log.warning("mixed records")
logging.getLogger("my.model").debug("shapes")
logging.getLogger("my.model").warning("odd data")
print(os.environ.get("TF_CPP_MIN_LOG_LEVEL"), file=sys.stderr)
log.follow('{"logLevel": "info"}')
logging.info("again")
"""


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        ("debug", ["the log level is debug", "loss 0.5", "mixed records", "DEBUG my.model: shapes",
                   "WARNING my.model: odd data", "0"]),
        ("info", ["loss 0.5", "mixed records", "WARNING my.model: odd data", "2"]),
        ("warning", ["mixed records", "WARNING my.model: odd data", "2"]),
        ("error", ["2"]),
    ],
)  # fmt: skip
def test_the_values_say_what_a_worker_logs(
    level: str, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "2")
    command = [sys.executable, "-c", CODE, json.dumps({"logLevel": level})]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [*lines, "INFO root: again"]


async def test_a_ring_that_forms_is_not_a_line_for_each_call_of_its_members(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = KeyValueStore(lambda *_: None)
    port = await store.start()
    store.open(1)
    with caplog.at_level(logging.INFO):
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            assert (await session.put("/global/0", data=b"address")).status == 200
            assert await (await session.get("/global/0")).read() == b"address"
        await store.close()
    assert caplog.messages == []
