# SPDX-License-Identifier: Apache-2.0
"""A worker, put together from its loop and the parts that its job has.

The order of the parts is decided here: the loop calls them in this order at each moment. Servers of rows
become ready first; an evaluation comes before the callbacks, which see its metrics; the checkpoint
follows, and the final model is saved after the last checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from edl.config import Config
from edl.trainer.agreement.metric_values import Value
from edl.trainer.callbacks.interfaces import Callbacks
from edl.trainer.parts.async_loop import AsyncLoop
from edl.trainer.parts.callbacks import CallbackCalls
from edl.trainer.parts.checkpoints import CheckpointWriting, Due, never
from edl.trainer.parts.evaluation import Evaluation, EvaluationBatches
from edl.trainer.parts.export import FinalModel, export_from_servers
from edl.trainer.parts.history import HistoryWriting
from edl.trainer.parts.leased_steps import LeasedSteps
from edl.trainer.parts.part import LoopPart, StepSource
from edl.trainer.parts.restore import Restore
from edl.trainer.parts.ring_steps import RingSteps
from edl.trainer.parts.rows import RowServers
from edl.trainer.ps_client.client import PsClient
from edl.trainer.records.batches import Batches
from edl.trainer.ring.base import Ring
from edl.trainer.session.state import Session
from edl.trainer.session.telemetry import Telemetry
from edl.trainer.state import State
from edl.trainer.worker import Worker


def assemble(
    config: Config,
    session: Session,
    ring: Ring,
    state: State,
    batches: Batches,
    report: Telemetry,
    restore: Restore,
    export: Callable[[Mapping[str, Value] | None], None],
    *,
    servers: PsClient | None = None,
    async_loop: AsyncLoop | None = None,
    evaluation: Evaluation | None = None,
    keep: Callable[[int], None] = lambda step: None,
    callbacks: Callbacks | None = None,
    history: Callable[[Sequence[Mapping[str, Value]]], None] | None = None,
    more: Sequence[LoopPart] = (),
) -> Worker:
    """Return a worker with these parts. None: the job does not have this part.

    Args:
        restore: restores initial states; the worker writes checkpoints if it has any.
        export: saves the final model, and reports the result to the master. Its argument is the result of the
            evaluation; None if the model is still to be evaluated.
        servers: hold the rows of the model's tables, in asynchronous training all weights.
        async_loop: makes the steps of asynchronous training.
        evaluation: evaluates the model in the ring.
        keep: saves a copy of the trained model of this step before the ring evaluates it.
        callbacks: the user's.
        history: receives the history of all whole epochs, again and again.
        more: parts that come first.
    """
    parts = [*more]
    due: Due = never

    def save() -> None:
        export(rounds.final_metrics(state.ledger) if rounds is not None else None)

    if servers is not None and async_loop is None:
        parts.append(RowServers(servers, session, ring, state, restore))
    rounds = None
    if evaluation is not None:
        rounds = EvaluationBatches(evaluation, config, session, state, ring, report, keep)
        parts.append(rounds)
        due = rounds.due
    if callbacks is not None:
        refuse = async_loop.refuse_changed if async_loop is not None else lambda changed: None
        parts.append(CallbackCalls(callbacks, state, ring, report, refuse))
    if history is not None:
        parts.append(HistoryWriting(state, history))
    writing = None
    if restore.checkpoints is not None:
        newest = async_loop.pull_newest if async_loop is not None else lambda step: step
        writing = CheckpointWriting(restore.checkpoints, state, batches, config.evaluation.split, due, newest)
        parts.append(writing)
    steps: StepSource
    if async_loop is None:
        steps = RingSteps(config, session, state, batches, report)
        parts.append(FinalModel(session, save))
    else:
        steps = LeasedSteps(async_loop, session, ring, state, batches, report, restore, writing)
        parts.append(FinalModel(session, lambda: export_from_servers(async_loop, state, save)))
    return Worker(session, ring, state, report, steps, restore.initial_state, parts)
