# SPDX-License-Identifier: Apache-2.0
"""Reasons of notices: a stable name for programs beside each message for people.

The master attaches a reason to each notice: in its log, in the status, in `edl status`, and as the reason of
an Event on the release's object. Alerts and tests may rely on a reason; the message beside it may change.

Severity and share are columns of this one table:

severity   the type of the Event: Warning if a person may have to act
share      Events are rate-limited in two shares, so that many minor Events never delay a major one
"""

from __future__ import annotations

from enum import Enum, StrEnum


class Severity(StrEnum):
    """Types of Kubernetes Events."""

    NORMAL = "Normal"
    WARNING = "Warning"


class Share(Enum):
    """Share of the rate limit in which the Events of a reason are counted."""

    MAJOR = "major"
    MINOR = "minor"


NORMAL, WARNING = Severity.NORMAL, Severity.WARNING
MAJOR, MINOR = Share.MAJOR, Share.MINOR


class Reason(StrEnum):
    """Why a notice was sent."""

    severity: Severity
    share: Share

    def __new__(cls, value: str, severity: Severity, share: Share) -> Reason:
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.severity, reason.share = severity, share
        return reason

    # The ring.
    RingFormed = "RingFormed", NORMAL, MAJOR  # the first ring, or the first after a pause
    RingReshaped = "RingReshaped", NORMAL, MAJOR
    RingBroken = "RingBroken", WARNING, MAJOR  # before its first step
    RingPending = "RingPending", NORMAL, MAJOR  # too few workers are ready
    StateLost = "StateLost", WARNING, MAJOR  # every worker that held the state is lost
    ReplicaDivergence = "ReplicaDivergence", WARNING, MAJOR  # the members' states are not equal bit for bit
    RolledBack = "RolledBack", WARNING, MAJOR  # ring and parameter servers returned to an earlier step
    Restored = "Restored", NORMAL, MAJOR  # from a checkpoint
    # Resumed by force from a checkpoint with different values.
    IncompatibleResume = (
        "IncompatibleResume",
        WARNING,
        MAJOR,
    )
    WarmStarted = "WarmStarted", NORMAL, MAJOR  # initial state loaded from initFrom.path
    FailedOver = "FailedOver", NORMAL, MAJOR  # a new master has taken over the workers

    # The workers.
    WorkerPending = "WorkerPending", NORMAL, MINOR
    WorkerReady = "WorkerReady", NORMAL, MINOR
    WorkerDraining = "WorkerDraining", NORMAL, MINOR
    # It sends no heartbeats, and is not replaced yet; if it alone holds the state, the ring waits for it.
    WorkerUnreachable = (
        "WorkerUnreachable",
        WARNING,
        MAJOR,
    )
    WorkerRecovered = "WorkerRecovered", NORMAL, MAJOR  # it sends heartbeats again after WorkerUnreachable
    WorkerLost = "WorkerLost", NORMAL, MINOR
    WorkerExited = "WorkerExited", NORMAL, MINOR
    WorkerFailed = "WorkerFailed", WARNING, MAJOR  # charged to the job: see elastic.maxFailures
    RestartBackOff = "RestartBackOff", WARNING, MAJOR  # workers are killed again and again, without progress
    WorkerPreempted = "WorkerPreempted", WARNING, MAJOR
    PodExists = "PodExists", WARNING, MAJOR  # a different pod has the name of a worker's pod
    NodeAvoided = "NodeAvoided", WARNING, MAJOR

    # The parameter servers.
    ServerReady = "ServerReady", NORMAL, MINOR
    ModeDecided = "ModeDecided", NORMAL, MAJOR  # the model needs parameter servers, which start now
    Resharded = "Resharded", NORMAL, MAJOR  # the rows are on a different number of servers
    ReshardFailed = "ReshardFailed", WARNING, MAJOR  # the rows stay on the servers where they were
    # The ring waits for a server that does not answer.
    ServerUnavailable = (
        "ServerUnavailable",
        WARNING,
        MAJOR,
    )
    ServerRecovered = "ServerRecovered", NORMAL, MAJOR  # it answers again after ServerUnavailable
    ServerRemoved = "ServerRemoved", WARNING, MAJOR  # the ring continues with its replicas
    ServerRestarted = "ServerRestarted", WARNING, MAJOR  # its process hung and was killed
    ServerExited = "ServerExited", WARNING, MAJOR  # it is replaced; its rows are in its log

    ModelWarning = "ModelWarning", WARNING, MAJOR  # found before the first step; training continues

    BadRecord = "BadRecord", WARNING, MAJOR  # it is skipped

    Checkpointed = "Checkpointed", NORMAL, MINOR  # the first one; the status has the later ones
    CheckpointsOff = "CheckpointsOff", NORMAL, MAJOR  # training restarts from scratch if all workers die
    Stopping = "Stopping", NORMAL, MAJOR  # the job ends once its state is in a checkpoint
    DeadlineExceeded = "DeadlineExceeded", WARNING, MAJOR  # activeDeadlineSeconds
    StopFailed = "StopFailed", WARNING, MAJOR  # the job continues, because its state is in no checkpoint

    # What people change.
    Scaled = "Scaled", NORMAL, MAJOR
    EpochsChanged = "EpochsChanged", NORMAL, MAJOR
    ScaleSuperseded = "ScaleSuperseded", NORMAL, MAJOR  # an `edl scale` that the chart's values replace
    Suspended = "Suspended", NORMAL, MAJOR
    Resumed = "Resumed", NORMAL, MAJOR
    SpecRefused = "SpecRefused", WARNING, MAJOR
    RunStarted = "RunStarted", NORMAL, MAJOR  # a new run follows an earlier one: runId has changed

    # The master itself.
    Degraded = "Degraded", WARNING, MAJOR  # a subsystem fails: writing the status, deleting pods, a watch
    Recovered = "Recovered", NORMAL, MAJOR  # the subsystem works again

    # Progress, and the end.
    EpochApplied = "EpochApplied", NORMAL, MINOR
    Saving = "Saving", NORMAL, MAJOR
    SaveFailed = "SaveFailed", WARNING, MAJOR  # servers have lost rows of the model; training continues
    Evaluating = "Evaluating", NORMAL, MAJOR
    Evaluated = "Evaluated", NORMAL, MINOR
    Succeeded = "Succeeded", NORMAL, MAJOR
    Failed = "Failed", WARNING, MAJOR
    Stopped = "Stopped", NORMAL, MAJOR
