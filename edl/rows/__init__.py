# SPDX-License-Identifier: Apache-2.0
"""Embedding rows for readers: from live servers, and from exported files."""
