"""Workers as pods: the backend of a master that the chart has deployed.

term      which master acts
retry     asking until the API answers
release   what the chart has rendered, and what earlier masters have left
stamp     the chart's pod becomes a worker's
verdict   how a worker ended, judged by its pod
workers   what happens to the workers' pods
making    pods are made
removing  pods are deleted
labels    rank and state on the pods
status    what people see with kubectl: the status ConfigMap
event_recorder    and Events
backend   the adapter itself: effects become pods, pods become events
"""

from master.backends.kubernetes.backend import Kubernetes
from master.backends.kubernetes.leader_election import Term
from master.backends.kubernetes.release import Found, Place
from master.backends.kubernetes.retry import patiently

__all__ = ["Found", "Kubernetes", "Place", "Term", "patiently"]
