# SPDX-License-Identifier: Apache-2.0
"""Embedding tables in a model: lookups, rows on servers, rows in a checkpoint."""
