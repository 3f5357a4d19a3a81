# SPDX-License-Identifier: Apache-2.0
"""Workers as pods: the backend of a master that the chart has deployed.

leader_election  elects the acting master by a Lease
masters          the masters' pods, and the label by which the Service selects the acting one
retry            repeats requests until the API answers
release          the chart's objects and the state of earlier masters, parsed
installed        a cache of the release's objects
pod_template     makes a worker's pod from the chart's template
pod_control      creates and deletes pods
nodes            nodes that seem to be lost
exit_cause       why a worker ended, judged by its pod
server_set       the number of parameter servers
worker_pods      the table of workers and their pods
pod_view         a worker and its pod, and the stages of a pod
pod_reuse        reuses the pod of a crashed worker
labels           rank and state as labels of the pods
status           the status ConfigMap, for kubectl and the next master
event_recorder   Kubernetes Events
backend          the adapter itself: effects become pods, pods become events
ended_run        the remaining work for a run that has ended
"""

from edl.master.backends.kubernetes.backend import Kubernetes
from edl.master.backends.kubernetes.ended_run import EndedRun
from edl.master.backends.kubernetes.installed import Installed
from edl.master.backends.kubernetes.leader_election import LeaderElection
from edl.master.backends.kubernetes.release import Found, Place
from edl.master.backends.kubernetes.retry import until_answered
from edl.master.backends.kubernetes.server_set import ServerSet

__all__ = [
    "EndedRun",
    "Found",
    "Installed",
    "Kubernetes",
    "LeaderElection",
    "Place",
    "ServerSet",
    "until_answered",
]
