# SPDX-License-Identifier: Apache-2.0
"""Asynchronous SGD (mode=ps): workers push steps in any order, and each server applies each step once."""
