# SPDX-License-Identifier: Apache-2.0
"""A worker's connection to the parameter servers of its job, which ends with its ring."""

from __future__ import annotations

from edl.config import Config
from edl.contract.proto import ps_pb2 as pb
from edl.errors import ModelError
from edl.trainer.ps_client.client import PsClient
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
    """Return the job's parameter servers.

    The session cuts calls to them with the ring, and reports which server this worker waits for.
    """
    asynchronous = pb.Asynchronous(
        grads_to_wait=config.ps.grads_to_wait,
        max_staleness=config.ps.max_staleness,
        scale_rate=config.ps.scale_rate_by_staleness,
    )
    servers = PsClient.at(
        stream.servers,
        stream.token,
        stream.run_id,
        config.training.seed,
        config.ps.replicas,
        config.ps.timeout_seconds,
        asynchronous if config.asynchronous else None,
    )

    def cut() -> None:
        ring.cut()
        servers.cut()

    stream.session.cuts(cut)
    stream.session.waits = servers.waiting
    return servers
