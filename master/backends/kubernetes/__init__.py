"""Workers as pods: the backend of a master that the chart has deployed.

leader_election  which master acts
masters          their pods, and which of them the Service leads to
retry            asking until the API answers
release          what the chart has rendered, and what earlier masters have left
installed        the release's objects as they are now, kept up to date
pod_template     the chart's pod becomes a worker's
pod_control      pods are created and deleted
nodes            nodes that seem to be lost
exit_cause       why a worker ended, judged by its pod
server_set       how many parameter servers there are to be
workers          what happens to the workers' pods
labels           rank and state on the pods
status           what people see with kubectl: the status ConfigMap
event_recorder   and Events
backend          the adapter itself: effects become pods, pods become events
ended_run        what is left to do for a run that has ended
"""

from edl.master.backends.kubernetes.backend import Kubernetes
from edl.master.backends.kubernetes.ended_run import EndedRun
from edl.master.backends.kubernetes.installed import Installed
from edl.master.backends.kubernetes.leader_election import LeaderElection
from edl.master.backends.kubernetes.release import Found, Place
from edl.master.backends.kubernetes.retry import until_answered
from edl.master.backends.kubernetes.server_set import ServerSet

__all__ = [
    "EndedRun", "Found", "Installed", "Kubernetes", "LeaderElection", "Place", "ServerSet", "until_answered",
]  # fmt: skip
