# SPDX-License-Identifier: Apache-2.0
"""The master's gRPC server: the streams of its workers, and the calls of commands."""
