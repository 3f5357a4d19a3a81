# SPDX-License-Identifier: Apache-2.0
"""Rows are exported from servers that listen, while a job learns: all of them, and what has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from edl.cli.app import app
from edl.contract import artifacts
from edl.contract.tokens import for_reading
from edl.errors import ConfigError, EdlError
from edl.rows import export
from edl.rows.client import Client
from tests.unit.ps.test_serving import DIM, Job, away, client, job

__all__ = ["client", "job"]  # fixtures
pytestmark = pytest.mark.waits
IDS = np.arange(20_000, dtype=np.int64) * 7919 - (1 << 40)


def read(directory: Path, table: str = "words") -> dict[int, list[float]]:
    found = parquet.read_table(directory / f"{table}.parquet")
    return dict(zip(found["id"].to_pylist(), found["values"].to_pylist(), strict=True))


def size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir())


async def test_after_one_id_in_a_hundred_was_learned_at_most_a_tenth_is_exported(
    job: Job, client: Client, tmp_path: Path
) -> None:
    await job.begin()
    await job.learn(IDS)
    await job.learn(IDS[:5])  # of the last step, all rows come again
    first = await away(lambda: export.export(client, tmp_path / "first"))
    assert [(each.table, each.rows, each.whole) for each in first] == [
        ("first", 0, True),
        ("words", len(IDS), True),
    ]
    await job.learn(IDS[::100])
    (second,) = await away(lambda: export.export(client, tmp_path / "second", ["words"], tmp_path / "first"))
    assert not second.whole and len(IDS) // 100 <= second.rows <= len(IDS) // 100 + 10
    assert size(tmp_path / "second") <= size(tmp_path / "first") / 10
    copy = read(tmp_path / "first") | read(tmp_path / "second")
    there = await away(lambda: client.rows("words", IDS))
    np.testing.assert_array_equal(np.array([copy[id] for id in IDS.tolist()], np.float32), there)
    assert all(len(row) == DIM for row in copy.values())

    # Also by the file that keeps the marks; nothing has changed but the last step, which comes again.
    marks = tmp_path / "second" / export.MARK
    (third,) = await away(lambda: export.export(client, tmp_path / "third", ["words"], marks))
    assert not third.whole and third.rows == len(IDS) // 100
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


async def test_the_command_says_what_it_has_written_and_refuses_in_words(job: Job, tmp_path: Path) -> None:
    await job.begin()
    await job.learn(IDS[:100])
    output = tmp_path / "job"
    output.mkdir()
    artifacts.write_contact(output, artifacts.Contact("127.0.0.1:1", "token", 1))

    async def edl(*words: str) -> Any:
        given = ["rows", "export", str(output), "--servers", ",".join(job.addresses), *words]
        return await away(lambda: CliRunner().invoke(app, given))

    done = await edl("--output", str(tmp_path / "rows"), "--table", "words")
    assert done.exit_code == 0, done.exception
    assert "words.parquet: 100 rows (all) at step 1, " in done.output
    assert len(read(tmp_path / "rows")) == 100
    x, mistakes = str(tmp_path / "x"), str(output / artifacts.CONTACT)
    for words, expected in (
        (["--output", str(tmp_path / "rows")], "rows already exists"),
        (["--output", x, "--table", "shops"], "unknown table 'shops': the job has 'first', 'words'"),
        (["--output", x, "--since", str(tmp_path / "no")], "expected the directory of an earlier"),
        (["--output", x, "--since", mistakes], "is not the mark.json"),
    ):
        refused = await edl(*words)
        assert refused.exit_code and isinstance(refused.exception, ConfigError), refused
        assert expected in str(refused.exception)
    assert not (tmp_path / "x").exists()


async def test_what_cannot_be_finished_leaves_nothing(job: Job, tmp_path: Path) -> None:
    await job.begin()
    await job.learn(IDS[:100])
    with Client(job.addresses, for_reading("token"), timeout=0.5) as client:
        first = await away(lambda: export.export(client, tmp_path / "first"))
        said = json.loads((tmp_path / "first" / export.MARK).read_text())
        assert said["tables"]["words"]["mark"] == first[1].mark
        await job.end(len(job.addresses) - 1)
        with pytest.raises(EdlError, match="parameter server"):
            await away(lambda: export.export(client, tmp_path / "second"))
    assert [path.name for path in tmp_path.glob("*second*")] == []
