# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to the parameter servers of its job, which ends with its ring."""

from __future__ import annotations

from edl.config import Config
from edl.errors import ModelError
from edl.trainer.ps_client.async_client import AsyncPsClient
from edl.trainer.ps_client.calls import Link
from edl.trainer.ps_client.client import PsClient
from edl.trainer.ps_client.interrupt import Interrupt
from edl.trainer.ps_client.link import ServerLink
from edl.trainer.ring.base import Ring
from edl.trainer.session.client import MasterStream
from edl.trainer.step.learner import KerasLearner
from edl.trainer.step.own_step import OwnStepLearner


def servers_of(
    config: Config, stream: MasterStream, ring: Ring, learner: KerasLearner | OwnStepLearner
) -> PsClient | None:
    """Return the parameter servers that hold the rows of the model's tables; None if the job has none.

    Calls to them end when the ring is cut.

    Raises:
        ModelError: the job has parameter servers, but the model has no rows for them, or has a train_step()
            of its own.
    """
    if not config.servers:
        return None
    if isinstance(learner, OwnStepLearner):
        raise ModelError(
            f"mode is {config.mode}, and the model has its own train_step(), which cannot use rows "
            "that are on servers. Remove train_step(), or set mode=train"
        )
    if not learner.tables and learner.model.built:
        raise ModelError(
            f"mode is {config.mode}, and the model has no edl.layers.Embedding, so nothing of it would be on "
            "parameter servers: set mode=train, or ps.replaceEmbeddings, if it has a large "
            "keras.layers.Embedding"
        )
    return connected(config, stream, ring)


def connected(config: Config, stream: MasterStream, ring: Ring) -> PsClient:
    """Return the job's parameter servers. Calls to them end when the ring is cut."""
    servers = PsClient.at(
        stream.servers,
        stream.token,
        stream.run_id,
        config.training.seed,
        config.ps.replicas,
        config.ps.timeout_seconds,
    )
    _cut_with(ring, servers, stream)
    return servers


def step_servers_of(config: Config, stream: MasterStream, ring: Ring) -> AsyncPsClient:
    """Return the parameter servers that hold all weights. Calls to them end when the ring is cut."""
    how, interrupt = config.ps, Interrupt()
    patience = None if how.replicas < 2 else how.timeout_seconds

    def connect(index: int, address: str) -> Link:
        return ServerLink(index, address, stream.token, interrupt, patience=patience)

    links = [connect(index, address) for index, address in enumerate(stream.servers)]
    servers = AsyncPsClient(
        links,
        stream.run_id,
        config.training.seed,
        interrupt,
        how.grads_to_wait,
        how.max_staleness,
        how.scale_rate_by_staleness,
        how.replicas,
        connect,
        stream.servers,
    )
    _cut_with(ring, servers, stream)
    return servers


def _cut_with(ring: Ring, servers: PsClient | AsyncPsClient, stream: MasterStream) -> None:
    """Let the session cut the servers with the ring, and report for which server this worker waits."""

    def cut() -> None:
        ring.cut()
        servers.cut()

    stream.session.cuts(cut)
    stream.session.waits = servers.waiting
