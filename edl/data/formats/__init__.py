# SPDX-License-Identifier: Apache-2.0
"""Formats of files, one module each; `by_name` has their names."""
