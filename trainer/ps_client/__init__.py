# SPDX-License-Identifier: Apache-2.0
"""The worker's side of parameter servers: connections, pulls and pushes, recovery."""
