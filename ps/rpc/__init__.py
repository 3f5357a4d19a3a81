# SPDX-License-Identifier: Apache-2.0
"""The gRPC service of a server."""
