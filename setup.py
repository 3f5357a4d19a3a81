"""The package `edl`, for tools that run setup.py. Everything about it is in pyproject.toml."""

from setuptools import setup

setup()
