"""A user's module: its functions, and those that it may lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.errors import ModelError
from trainer import user_model

MODULE = "def model(): ...\ndef data(split): ...\n"


def loaded(text: str, where: Path) -> user_model.UserModel:
    file = where / "mine.py"
    file.write_text(text)
    return user_model.load(str(file))


def test_feed_and_callbacks_may_be_missing(tmp_path: Path) -> None:
    found = loaded(MODULE, tmp_path)
    assert (found.feed, found.callbacks) == (None, None)


def test_a_module_of_that_name_which_was_imported_is_no_function_of_the_contract(tmp_path: Path) -> None:
    assert loaded("import json as callbacks\n" + MODULE, tmp_path).callbacks is None


def test_callbacks_are_found_by_their_name(tmp_path: Path) -> None:
    found = loaded(MODULE + "def callbacks(): return [1]\n", tmp_path)
    assert found.callbacks is not None
    assert found.callbacks() == [1]


def test_what_is_no_function_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no function callbacks\(\)"):
        loaded(MODULE + "callbacks = []\n", tmp_path)
