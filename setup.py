# SPDX-License-Identifier: Apache-2.0
"""The package `edl`, for tools that run setup.py. Everything about it is in pyproject.toml."""

from setuptools import setup

setup()
