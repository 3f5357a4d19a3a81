# SPDX-License-Identifier: Apache-2.0
"""What a worker decides where there is a GPU, tested without one."""

from __future__ import annotations

import os
import time

import keras
import pytest
import tensorflow as tf
from keras.src.trainers.trainer import Trainer

from edl.trainer.model.graphs import keep_xla_explicit
from edl.trainer.ring.gloo import HUNG_SECONDS
from edl.trainer.ring.graph_all_reduce import OVERDUE, GraphAllReduce
from edl.trainer.ring.horovod import HorovodRing


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras sees a GPU and decides by itself, after any test in this process; the changes are undone."""
    devices = [*tf.config.list_physical_devices(), tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda *_: devices)
    monkeypatch.setattr(keras.Model, "_resolve_auto_jit_compile", Trainer._resolve_auto_jit_compile)


def compiled_with(**options: bool | str) -> bool:
    """Whether Keras compiles a model of these options with XLA."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **options)
    return bool(model.jit_compile)


@pytest.mark.usefixtures("with_gpu")
def test_xla_is_used_only_where_the_model_asks_for_it() -> None:
    assert compiled_with() and compiled_with(jit_compile="auto"), "Keras decides as keep_xla_explicit says"
    keep_xla_explicit()
    assert not compiled_with() and not compiled_with(jit_compile="auto")
    assert compiled_with(jit_compile=True)


@pytest.mark.parametrize(("interface", "host"), [("lo", "worker-3"), ("eth0", None)])
def test_workers_of_one_machine_are_different_hosts_to_nccl(
    interface: str, host: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in os.environ if n.startswith(("NCCL_", "HOROVOD_"))]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    try:
        HorovodRing(1, interface, "worker-3")
        assert os.environ.get("NCCL_HOSTID") == host
        assert os.environ["NCCL_SOCKET_IFNAME"] == f"={interface}"
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_a_graph_that_outlasts_its_cut_ring_is_overdue() -> None:
    sums = GraphAllReduce()
    assert not sums.overdue(0.0, 1e9), "no graph runs"
    began = time.monotonic()
    with sums.ring_errors():
        pass
    longest = time.monotonic() - began  # at least as long as that graph took
    with sums.ring_errors():
        late = time.monotonic() + HUNG_SECONDS + OVERDUE * longest
        assert sums.overdue(0.0, late)
        assert not sums.overdue(0.0, began + HUNG_SECONDS)
        assert not sums.overdue(late - HUNG_SECONDS, late), "it may have waited for a slow rank until the cut"
    assert not sums.overdue(0.0, 1e9)
