"""The reasons of notices: a name for programs beside each sentence for people.

The master gives one with everything that it reports: in its log, in the status, in `edl status`, and as the
reason of an Event on the release's object. A reason is stable, so alerts and tests may rely on it; the
text beside it may change at any time.

Severity and share are columns of this one table:

severity   the type of the Event: Warning where somebody may have to act
share      Events are rate-limited in two shares, so that many of little weight never delay a weighty one
"""

from __future__ import annotations

from enum import Enum, StrEnum


class Severity(StrEnum):
    """The types that Kubernetes has for Events."""

    NORMAL = "Normal"
    WARNING = "Warning"


class Share(Enum):
    """Which share of the rate limit the Events of a reason are counted in."""

    MAJOR = "major"
    MINOR = "minor"


NORMAL, WARNING = Severity.NORMAL, Severity.WARNING
MAJOR, MINOR = Share.MAJOR, Share.MINOR


class Reason(StrEnum):
    """Why people are notified."""

    severity: Severity
    share: Share

    def __new__(cls, value: str, severity: Severity, share: Share) -> Reason:
        reason = str.__new__(cls, value)
        reason._value_ = value
        reason.severity, reason.share = severity, share
        return reason

    # The ring.
    RingFormed = "RingFormed", NORMAL, MAJOR  # where there was none
    RingReshaped = "RingReshaped", NORMAL, MAJOR
    RingBroken = "RingBroken", WARNING, MAJOR  # before its first step
    RingPending = "RingPending", NORMAL, MAJOR  # too few workers are ready
    StateLost = "StateLost", WARNING, MAJOR  # every worker that had the state is gone
    StatesDiffer = "StatesDiffer", WARNING, MAJOR  # of members, which ought to be equal bit for bit
    WentBack = "WentBack", WARNING, MAJOR  # ring and parameter servers, to what is left of the rows
    Restored = "Restored", NORMAL, MAJOR  # from a checkpoint
    Forced = "Forced", WARNING, MAJOR  # it goes on from a checkpoint that was made with other values
    WarmStarted = "WarmStarted", NORMAL, MAJOR  # with what another training has learned
    FailedOver = "FailedOver", NORMAL, MAJOR  # a new master has taken over the workers

    # The workers.
    WorkerPending = "WorkerPending", NORMAL, MINOR
    WorkerReady = "WorkerReady", NORMAL, MINOR
    WorkerDraining = "WorkerDraining", NORMAL, MINOR
    WorkerSilent = "WorkerSilent", WARNING, MAJOR  # and it alone holds the state: it is waited for
    WorkerAnswers = "WorkerAnswers", NORMAL, MAJOR  # it was silent, and was waited for
    WorkerLost = "WorkerLost", NORMAL, MINOR
    WorkerExited = "WorkerExited", NORMAL, MINOR
    WorkerFailed = "WorkerFailed", WARNING, MAJOR  # charged to the job: see elastic.maxFailures
    RestartBackOff = "RestartBackOff", WARNING, MAJOR  # workers are killed again and again, without progress
    WorkerPreempted = "WorkerPreempted", WARNING, MAJOR
    PodExists = "PodExists", WARNING, MAJOR  # another pod has the name of a worker's
    NodeAvoided = "NodeAvoided", WARNING, MAJOR

    # The parameter servers.
    ServerReady = "ServerReady", NORMAL, MINOR
    ModeDecided = "ModeDecided", NORMAL, MAJOR  # the model needs parameter servers, which start now
    ServersMoved = "ServersMoved", NORMAL, MAJOR  # the rows, to another number of servers
    ServersStay = "ServersStay", WARNING, MAJOR  # the rows could not be moved to another number of servers
    ServerAwaited = "ServerAwaited", WARNING, MAJOR  # the ring waits for one that does not answer
    ServerAnswers = "ServerAnswers", NORMAL, MAJOR  # and does so no longer
    ServerOut = "ServerOut", WARNING, MAJOR  # one is away, and others have its rows, too
    ServerRestarted = "ServerRestarted", WARNING, MAJOR  # its process hangs, and is killed
    ServerExited = "ServerExited", WARNING, MAJOR  # another one takes its place; its rows are in its log

    ModelWarning = "ModelWarning", WARNING, MAJOR  # found before the first step; the training goes on

    BadRecord = "BadRecord", WARNING, MAJOR  # it is left out

    Checkpointed = "Checkpointed", NORMAL, MINOR  # the first one; the status tells of those after it
    CheckpointsOff = "CheckpointsOff", NORMAL, MAJOR  # nothing is left when all workers are lost
    Stopping = "Stopping", NORMAL, MAJOR  # the job ends once its state is in a checkpoint
    DeadlineExceeded = "DeadlineExceeded", WARNING, MAJOR  # activeDeadlineSeconds
    NotStopped = "NotStopped", WARNING, MAJOR  # it goes on, because it is in none

    # What people change.
    Scaled = "Scaled", NORMAL, MAJOR
    EpochsChanged = "EpochsChanged", NORMAL, MAJOR
    ScaleSuperseded = "ScaleSuperseded", NORMAL, MAJOR  # an `edl scale` that the chart's values replace
    Suspended = "Suspended", NORMAL, MAJOR
    Resumed = "Resumed", NORMAL, MAJOR
    SpecRefused = "SpecRefused", WARNING, MAJOR

    # The master itself.
    Degraded = "Degraded", WARNING, MAJOR  # a part of it fails: writing the status, deleting pods, a watch
    Recovered = "Recovered", NORMAL, MAJOR  # and works again

    # Progress, and the end.
    EpochApplied = "EpochApplied", NORMAL, MINOR
    Saving = "Saving", NORMAL, MAJOR
    NotSaved = "NotSaved", WARNING, MAJOR  # servers have lost rows of the model: it is trained on
    Evaluating = "Evaluating", NORMAL, MAJOR
    Evaluated = "Evaluated", NORMAL, MINOR
    Succeeded = "Succeeded", NORMAL, MAJOR
    Failed = "Failed", WARNING, MAJOR
    Stopped = "Stopped", NORMAL, MAJOR
