# SPDX-License-Identifier: Apache-2.0
"""Connections: TLS, listeners, the readiness probe, and a client of the master."""
