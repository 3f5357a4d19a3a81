# SPDX-License-Identifier: Apache-2.0
"""Backends start and end workers for the master: as processes, in Kubernetes, or by hand."""
