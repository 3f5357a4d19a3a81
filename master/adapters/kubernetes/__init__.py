"""Workers as pods: the backend of a master that the chart has deployed.

pods      what the master stamps onto a worker's pod, and what it reads from one
backend   the adapter itself: effects become pods, pods become events
show      what people see with kubectl: status, events, labels
"""

from master.adapters.kubernetes.backend import Found, Kubernetes, Place

__all__ = ["Found", "Kubernetes", "Place"]
