"""Masters on Kubernetes: candidates, the acting one, and the runs of a release."""
