# SPDX-License-Identifier: Apache-2.0
"""The list of exported files: what is written is read again, and nothing else is accepted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from edl.contract.exports import Damaged, Export, File, dumps, parse

FILE = File(3, "0f" * 32)
WHOLE = [
    Export("keras", "model.keras", True, {"model.keras": FILE}),
    Export("savedmodel", "/kept/model.savedmodel", False, {"model.savedmodel/a/b.pb": FILE}),
]


def test_what_is_written_is_read_again() -> None:
    assert parse(dumps(WHOLE).encode()) == {export.format: export for export in WHOLE}
    assert list(WHOLE[0].places) == ["model.keras"]
    assert list(WHOLE[1].places) == ["/kept/model.savedmodel/a/b.pb"]


def files(entries: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = entries[0]["files"]
    return found


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda e: e.append(dict(e[0])), "a format is listed twice"),
        (lambda e: files(e).update({"../secret": files(e)["model.keras"]}), "../secret, which is not in"),
        (
            lambda e: files(e).update({"model.keras/../x": files(e)["model.keras"]}),
            "which is not in model.keras",
        ),
        (lambda e: files(e)["model.keras"].update(bytes=-1), "model.keras: the size is -1"),
        (lambda e: files(e)["model.keras"].update(bytes=True), "model.keras: the size is True"),
        (lambda e: files(e)["model.keras"].update(sha256="0F" * 32), "expected 64 hexadecimal digits"),
        (lambda e: files(e)["model.keras"].pop("sha256"), "KeyError: 'sha256'"),
        (lambda e: e.append("keras"), "TypeError"),
    ],
)
def test_a_list_that_was_changed_is_refused(change: Callable[[list[Any]], None], words: str) -> None:
    listed = json.loads(dumps(WHOLE))
    change(listed["exports"])
    with pytest.raises(Damaged, match=words):
        parse(json.dumps(listed).encode())


@pytest.mark.parametrize("data", [b"", b"[]", b"\xff", b'{"exports": 3}'])
def test_what_is_no_list_is_refused(data: bytes) -> None:
    with pytest.raises(Damaged):
        parse(data)
