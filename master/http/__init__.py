# SPDX-License-Identifier: Apache-2.0
"""The master's HTTP server: health and metrics."""
