# SPDX-License-Identifier: Apache-2.0
"""The generator of click logs: records by index, power laws, and the best possible AUC."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import edl
from edl.data.base import RandomAccess
from edl.zoo.datasets import clicks
from edl.zoo.datasets.clicks import FIELDS, MISSING, Clicks


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CLICKS_RECORDS", "CLICKS_IDS", "CLICKS_SEED", "CLICKS_BUCKETS", "CRITEO", "CRITEO_TEST"):
        monkeypatch.delenv(f"EDL_{name}", raising=False)


def test_a_record_depends_on_the_seed_and_its_index_alone() -> None:
    log = Clicks(1000, seed=7)
    assert isinstance(log, RandomAccess)
    whole, some = log.read(0, 1000), log.take(np.array([999, 3, 3]))
    for name, column in whole.items():
        assert np.array_equal(column[[999, 3, 3]], some[name])
        assert np.array_equal(Clicks(10**12, seed=7).read(0, 1000)[name], column), "a longer log"
        assert not np.array_equal(Clicks(1000, seed=8).read(0, 1000)[name], column)
        assert not np.array_equal(Clicks(1000, seed=7, first=1000).read(0, 1000)[name], column)
    assert np.array_equal(Clicks(1000, seed=7, first=990).read(0, 10)["ids"], whole["ids"][990:])


def test_the_records_are_those_of_a_click_log() -> None:
    records = Clicks(2000).read(0, 2000)
    assert {name: (column.dtype.name, column.shape) for name, column in records.items()} == {
        "clicked": ("float32", (2000,)),
        "numbers": ("float32", (2000, clicks.NUMBERS)),
        "ids": ("int64", (2000, len(FIELDS))),
    }
    assert set(np.unique(records["clicked"])) == {0, 1}
    assert 0.15 < records["clicked"].mean() < 0.3
    assert np.array_equal(records["ids"] >> 32, np.broadcast_to(np.arange(len(FIELDS)), (2000, len(FIELDS))))
    assert abs(records["numbers"].mean()) < 0.05
    assert abs(records["numbers"].std() - 1) < 0.05


@pytest.mark.parametrize("field", [0, 1, 4])
def test_a_category_of_rank_r_has_a_share_by_the_power_law(field: int) -> None:
    log = Clicks(300_000, ids=5000)
    size, exponent = log.sizes[field], FIELDS[field].exponent
    drawn = clicks._power_law(log._uniform(np.arange(300_000), field), size, exponent)
    shares = np.bincount(drawn.astype(np.int64), minlength=size) / 300_000
    assert len(shares) == size
    # The density between r and r + 1, which is the share that was promised but for the first few ranks.
    r = np.arange(1.0, size + 2)
    below = np.log(r) if exponent == 1 else (r ** (1 - exponent) - 1) / (1 - exponent)
    expected = np.diff(below) / below[-1]
    assert np.abs(shares - expected).max() < 6 * (expected.max() / 300_000) ** 0.5
    half = size // 2
    assert shares[half:].sum() == pytest.approx(expected[half:].sum(), rel=0.03), "the tail"


def test_no_two_categories_share_an_id() -> None:
    assert len(np.unique(clicks._scramble(np.arange(1_000_000, dtype=np.uint64)))) == 1_000_000


def test_the_true_probabilities_have_the_auc_that_is_promised() -> None:
    log = Clicks(100_000)
    ceiling, every = log.ceiling(), np.arange(100_000)
    assert 0.8 < ceiling < 0.84
    assert roc_auc_score(log.take(every)["clicked"], log.probability(every)) == pytest.approx(
        ceiling, abs=6e-3
    )


def test_millions_of_ids_cost_nothing() -> None:
    log = Clicks(10**9, ids=50_000_000)
    ids = log.take(np.random.default_rng(1).integers(0, 10**9, 50_000))["ids"]
    assert len(np.unique(ids[:, 0])) > 20_000


def test_it_says_that_it_is_synthetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert "SYNTHETIC" in (clicks.__doc__ or "")
    train, test = clicks.data("train"), clicks.data("validation")
    assert clicks.data("predict") is None
    said = capsys.readouterr().err
    assert "synthetic click log: 20,000 records" in said and "no real data" in said
    assert train is not None and test is not None
    assert (len(train), len(test)) == (20_000, 3333)
    assert not np.array_equal(train.read(0, 100)["ids"], test.read(0, 100)["ids"])


def test_hashed_ids_are_below_the_number_of_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = Clicks(1000).read(0, 1000)["ids"]
    monkeypatch.setenv("EDL_CLICKS_BUCKETS", "1000")
    pairs = clicks.crossed(ids, 0, 1)
    for bounded in (clicks.hashed(ids), pairs):
        assert bounded.min() >= 0 and bounded.max() < 1000
    assert np.array_equal(clicks.hashed(ids[:7]), clicks.hashed(ids)[:7])
    assert len(np.unique(pairs)) > 300
    monkeypatch.setenv("EDL_CLICKS_BUCKETS", "0")
    assert clicks.buckets() is None
    assert np.array_equal(clicks.hashed(ids), ids)
    assert clicks.crossed(ids, 0, 1).min() >= 1 << 62


def test_a_missing_category_is_one_of_its_own_in_each_field(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_CLICKS_BUCKETS", "0")
    missing = clicks.hashed(np.full((2, 26), MISSING))
    assert len(np.unique(missing)) == 26
    assert missing.min() >= 26 << 32, "behind the ids of all fields"


def test_a_log_of_criteo_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = "\t".join(["1", "", "-2", *["3"] * 11, *["68fd1e64"] * 25, ""]) + "\n"
    (tmp_path / "train.txt").write_text(line * 3)
    monkeypatch.setenv("EDL_CRITEO", str(tmp_path / "train.txt"))
    assert clicks.widths() == (13, 26)
    train = clicks.data("train")
    assert train is not None
    assert len(train) == 3
    record = train.read(1, 2)
    assert (record["clicked"].tolist(), record["ids"][0, :2].tolist()) == (
        [1],
        [0x68FD1E64, 1 << 32 | 0x68FD1E64],
    )
    assert record["ids"][0, -1] == MISSING
    assert record["numbers"][0, :3] == pytest.approx([0, 0, np.log1p(3)])
    assert clicks.data("validation") is None
    assert clicks.hashed(train.read(0, 3)["ids"]).min() >= 0


def test_a_wrong_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDL_CLICKS_RECORDS", "many")
    with pytest.raises(edl.EdlError, match="EDL_CLICKS_RECORDS: expected a whole number, and is 'many'"):
        clicks.data("train")
    with pytest.raises(edl.EdlError, match="3 ids: expected at least 1000"):
        Clicks(10, ids=3)
