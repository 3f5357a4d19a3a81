# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: written, restored, begun with, and the copy in memory."""
