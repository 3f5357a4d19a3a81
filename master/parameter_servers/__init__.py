# SPDX-License-Identifier: Apache-2.0
"""The master's view of parameter servers: their health, when a job has them, and their processes."""
