# SPDX-License-Identifier: Apache-2.0
"""Synchronous updates (mode=hybrid): a step stages its gradients, which are then committed or dropped."""
