# SPDX-License-Identifier: Apache-2.0
"""Evaluation and prediction, by the ring and by one worker."""
