# SPDX-License-Identifier: Apache-2.0
"""Models that run: each a small module with plain functions."""
