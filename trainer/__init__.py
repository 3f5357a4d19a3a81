# SPDX-License-Identifier: Apache-2.0
"""The process that learns: the worker's loop, its ring, its data and its model."""
