# SPDX-License-Identifier: Apache-2.0
"""What a server keeps on disk: the write-ahead log and its shards of checkpoints."""
