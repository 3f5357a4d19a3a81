# SPDX-License-Identifier: Apache-2.0
"""Resharding: moving rows between servers when the shard assignment changes."""
