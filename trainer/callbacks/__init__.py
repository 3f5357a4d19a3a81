# SPDX-License-Identifier: Apache-2.0
"""Keras callbacks in an elastic job, and the history that they see."""
