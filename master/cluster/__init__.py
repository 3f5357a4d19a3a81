# SPDX-License-Identifier: Apache-2.0
"""Masters on Kubernetes: candidates, the acting one, and the runs of a release."""
