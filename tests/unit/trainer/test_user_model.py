# SPDX-License-Identifier: Apache-2.0
"""A user's module: its functions, and those that it may lack."""

from __future__ import annotations

from pathlib import Path

import pytest

from edl.errors import ModelError
from edl.trainer.model import user_model

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


class OfLength:
    """A reader that says this of its length."""

    def __init__(self, length: object):
        self._length = length

    def __len__(self) -> int:
        return self._length  # type: ignore[return-value]

    def read(self, start: int, stop: int) -> None: ...


@pytest.mark.parametrize("length", ["12", -1, None, 1.5])
def test_a_length_that_is_none_is_told_with_the_function(length: object) -> None:
    module = user_model.UserModel("mine.py", lambda: None, lambda split: OfLength(length), None)
    wanted = r"mine.py: __len__\(\) of what data\('train'\) returns must give the number of records"
    with pytest.raises(ModelError, match=wanted):
        module.reader("train")


def test_a_model_in_the_place_of_the_function_that_returns_it_is_refused_with_what_to_write(
    tmp_path: Path,
) -> None:
    text = """
class Sequential:
    def __call__(self, x): return x
    def get_config(self): return {}
model = Sequential()
def data(split): ...
"""
    wanted = (
        r"model is a Sequential, and must be a function that returns one. Write: def model\(\): "
        r"m = Sequential\(...\); m.compile\(...\); return m"
    )
    with pytest.raises(ModelError, match=wanted):
        loaded(text, tmp_path)
