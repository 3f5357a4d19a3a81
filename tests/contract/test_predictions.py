# SPDX-License-Identifier: Apache-2.0
"""One contract for all places of predictions: a directory, memory, S3, and the volume of a master."""

from __future__ import annotations

import io
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.errors import ConfigError, StoreUnavailable
from edl.trainer.evaluation.prediction import FORMATS, Book, PredictionError, PredictionFiles
from edl.trainer.runtime.retry import tried_again
from tests.contract.conftest import Place

RECORDS, PART = 10, 3
BOOK = Book(RECORDS, PART, "a model", "its weights", "npz")


def files_in(place: Place) -> PredictionFiles:
    """The files as another worker sees them."""
    return PredictionFiles(f"{place.url}/predictions", FORMATS["npz"], RECORDS, PART)


def write(files: PredictionFiles, part: int) -> None:
    ids = np.arange(*files.ends(part))
    files.write(part, ids, {"output": 2.0 * ids})


def test_each_record_is_there_once_after_a_lost_writer_and_a_second_job(place: Place) -> None:
    first = files_in(place)
    assert first.begin(BOOK) == 0
    for part in (0, 2):
        write(first, part)
    name = f"{place.root}/predictions/.0123abcd.unfinished"
    place.client.pipe_file(name, b"of a worker that was killed")
    second = files_in(place)
    assert second.begin(BOOK) == 1
    with pytest.raises(PredictionError, match="predictions that differ in weights"):
        files_in(place).begin(Book(RECORDS, PART, "a model", "other weights", "npz"))
    with pytest.raises(
        PredictionError, match=r"2 parts of the predictions are missing, the first: part-0+3-"
    ):
        second.end()
    for part in (1, 2, 3):  # one of them again
        write(second, part)
    second.end()
    book, *parts = sorted(place.files("predictions"), key=lambda path: "part-" in path)
    assert len(parts) == 4, "the unfinished file is removed"
    assert json.loads(place.client.cat_file(book))["complete"]
    loaded = [np.load(io.BytesIO(place.client.cat_file(part))) for part in parts]
    assert np.concatenate([part["ids"] for part in loaded]).tolist() == list(range(RECORDS))
    assert np.concatenate([part["output"] for part in loaded]).tolist() == [2 * n for n in range(RECORDS)]


@pytest.mark.parametrize("call", ["write", "rename", "sizes", "open", "remove"])
def test_a_place_that_is_away_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr("edl.trainer.runtime.retry.FIRST_PAUSE", 0.01)
    told: list[str] = []
    again = partial(tried_again, seconds=30.0, tell=told.append)
    files = PredictionFiles(str(tmp_path), FORMATS["npz"], RECORDS, PART, again)
    there, tries = getattr(files._place, call), list[Any]()

    def away(*arguments: Any) -> Any:
        tries.append(arguments)
        if len(tries) < 3:
            raise StoreUnavailable("away")
        return there(*arguments)

    monkeypatch.setattr(files._place, call, away)
    assert files.begin(BOOK) == 0
    for part in range(files.parts):
        write(files, part)
    files.end()
    assert told == ["away; it is tried again for 30 s"] and len(tries) >= 3
    assert json.loads((tmp_path / "predictions.json").read_text())["complete"]
    assert len([*tmp_path.glob("part-*")]) == files.parts and not [*tmp_path.glob(".*")]


def test_an_address_without_a_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"s3://bucket: expected a folder in it, such as s3://bucket/pred"):
        PredictionFiles("s3://bucket", FORMATS["npz"], RECORDS, PART)
