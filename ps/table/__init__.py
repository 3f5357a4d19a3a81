# SPDX-License-Identifier: Apache-2.0
"""Rows of embedding tables in memory, and the compiled kernels that update them."""
