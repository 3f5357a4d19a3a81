# SPDX-License-Identifier: Apache-2.0
"""What the epochs have given: history, its files, and what callbacks remember."""

from __future__ import annotations

import json
import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edl.trainer.agreement.epochs import CallbackUpdate, Epochs, columns
from edl.trainer.callbacks import history
from edl.trainer.runtime.serialization import NotPlain, decode, encode

VALUES: dict[str, Any] = {
    "numbers": [1, -(1 << 80), 0.1, math.inf, True, None],
    "texts": ("ü", "", b"\x00\xff"),
    "containers": {1: {"a": [(), set(), {(1, 2): frozenset({3})}]}, None: deque([1, 2], 5)},
    "a number of NumPy": np.float32(0.1),
}


@pytest.mark.parametrize("name", VALUES)
def test_plain_values_come_back_as_they_were(name: str) -> None:
    found = decode(encode(VALUES[name]))
    assert repr(found) == repr(VALUES[name])
    assert type(found) is type(VALUES[name])


def test_arrays_come_back_as_ones_that_may_be_changed() -> None:
    given: list[np.ndarray] = [
        np.arange(6, dtype=np.int16).reshape(2, 3)[:, ::2],
        np.zeros((0, 3), np.float64),
        np.array("text"),
    ]
    found = decode(encode({"several": given, "after": b"them"}))
    assert found["after"] == b"them"
    for ours, theirs in zip(found["several"], given, strict=True):
        np.testing.assert_array_equal(ours, theirs, strict=True)
    found["several"][0] += 1
    assert given[0][0, 0] == 0


def test_a_type_that_numpy_does_not_have_by_itself_comes_back() -> None:
    import ml_dtypes

    given = np.array([1.5, -2], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(decode(encode(given)), given, strict=True)


@pytest.mark.parametrize("value", [object(), [print], {"a": np.array([object()])}, Path("a")])
def test_what_is_no_plain_value_is_refused(value: Any) -> None:
    with pytest.raises(NotPlain):
        encode(value)


def test_a_list_that_holds_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(NotPlain):
        encode(endless)


def test_the_loss_of_an_epoch_is_the_mean_over_its_records_whoever_trained_on_them() -> None:
    epochs = Epochs().after(2.0, 30)
    epochs = Epochs.unpack(epochs.pack()).after(5.0, 10).whole({"mae": 0.5})  # taken over in the middle
    assert epochs.history == ({"loss": 2.75, "mae": 0.5},)
    assert epochs.after(1.0, 4).whole({}).evaluated({"loss": 3.0}).history[1] == {
        "loss": 1.0,
        "val_loss": 3.0,
    }


def test_an_epoch_of_which_every_step_was_left_out_has_no_loss() -> None:
    assert Epochs().whole({}).history == ({},)


def test_callbacks_are_due_at_the_beginning_and_the_end_of_each_epoch() -> None:
    epochs = Epochs()
    assert epochs.due(0, more=True)
    assert not epochs.due(0, more=False)  # nothing is to be trained
    epochs = Epochs(begun=1)
    assert not epochs.due(0, more=True)
    assert epochs.due(1, more=False)
    assert not Epochs(ended=1, begun=1).due(1, more=False)
    assert Epochs(ended=1, begun=1).due(1, more=True)  # people want more epochs


def test_who_stops_the_training_lowers_the_number_of_epochs_until_the_job_goes_on() -> None:
    stopped = Epochs(stop=3, stopped_by="EarlyStopping", stop_of=9)
    assert [stopped.limit(epochs) for epochs in (2, 3, 9)] == [2, 3, 3]
    assert stopped.going_on(9, before=9).limit(9) == 3  # it is done
    assert stopped.going_on(12, before=9).limit(12) == 12


def test_what_is_written_beside_a_checkpoint_comes_back() -> None:
    epochs = Epochs(({"loss": 0.1, "mae": math.nan},), 0.3, 2, 1, 1, memory=b"\x00")
    told = json.loads(json.dumps(epochs.to_json()).replace("NaN", '"nan"'))
    assert repr(Epochs.from_json(told, b"\x00")) == repr(epochs)


def test_a_turn_travels_whole() -> None:
    values = {3: np.array([1, 2], np.uint8), 70: np.zeros(0, np.uint8)}
    turn = CallbackUpdate(Epochs(({"loss": math.nan},), ended=1, memory=b"\x01"), values)
    found = CallbackUpdate.unpack(turn.pack())
    assert repr(found.after) == repr(turn.after)
    assert {place: value.tolist() for place, value in found.changed.items()} == {3: [1, 2], 70: []}


HISTORY = ({"loss": 0.5, "mae": 1.0}, {"loss": math.nan, "mae": 0.25, "val_loss": 2.0})


def test_the_files_have_a_column_for_each_name_that_an_epoch_has(tmp_path: Path) -> None:
    history.write(tmp_path, HISTORY)
    found = json.loads((tmp_path / "history.json").read_text())
    assert found == {"loss": [0.5, None], "mae": [1.0, 0.25], "val_loss": [None, 2.0]}
    table = (tmp_path / "history.csv").read_text()
    assert table == "epoch,loss,mae,val_loss\n0,0.5,1.0,\n1,nan,0.25,2.0\n"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["history.csv", "history.json"]


def test_columns_of_no_epochs_are_none() -> None:
    assert columns(()) == {}
