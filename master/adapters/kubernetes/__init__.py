"""Workers as pods: the backend of a master that the chart has deployed.

api       the API over HTTP, with good manners
watch     a part of its objects, kept up to date
pods      what the master stamps onto a worker's pod, and what it reads from one
backend   the adapter itself: effects become pods, pods become events
show      what people see with kubectl: status, events, labels
"""

from master.adapters.kubernetes.api import Api, ApiError, Pace
from master.adapters.kubernetes.backend import Found, Kubernetes, Place

__all__ = ["Api", "ApiError", "Found", "Kubernetes", "Pace", "Place"]
