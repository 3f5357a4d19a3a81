# SPDX-License-Identifier: Apache-2.0
"""Which server has which row."""

from __future__ import annotations

import numpy as np
import pytest

from edl.contract.rows.buckets import BUCKETS, bucket_of, owners, server_of


def test_ids_spread_over_all_buckets_whatever_they_are() -> None:
    for ids in (np.arange(1 << 18), np.arange(1 << 18) << 32, -np.arange(1 << 18)):
        counts = np.bincount(bucket_of(ids.astype(np.int64)), minlength=BUCKETS)
        assert counts.min() > 20 and counts.max() < 120, "64 on average"


@pytest.mark.parametrize("servers", [1, 2, 3, 4, 7, 16])
def test_with_one_server_more_only_what_is_its_own_moves(servers: int) -> None:
    before, after = owners(servers), owners(servers + 1)
    moved = before != after
    assert set(after[moved]) == {servers}
    assert moved.mean() == pytest.approx(1 / (servers + 1), rel=0.15)


@pytest.mark.parametrize("servers", [1, 2, 4, 8])
def test_when_servers_are_doubled_half_of_the_rows_move(servers: int) -> None:
    assert (owners(servers) != owners(2 * servers)).mean() <= 0.55


def test_servers_have_about_as_many_rows_each() -> None:
    ids = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 100_000)
    for servers in (2, 3, 8):
        share = np.bincount(server_of(ids, servers), minlength=servers) / len(ids)
        assert share.min() > 0.85 / servers and share.max() < 1.15 / servers


def test_places_are_for_ever() -> None:
    """Rows in checkpoints and logs lie where these say."""
    assert bucket_of(np.array([0, 1, 2, -1, 2**62])).tolist() == [0, 1385, 3517, 2893, 302]
    assert [owners(5)[b] for b in (0, 1, 2, 3, 4095)] == [3, 0, 3, 2, 4]


def test_no_server_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        owners(0)
