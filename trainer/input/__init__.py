# SPDX-License-Identifier: Apache-2.0
"""Parallel input: reader processes that read and feed batches ahead of the steps that need them."""
