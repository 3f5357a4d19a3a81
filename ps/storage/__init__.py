"""What a server keeps on disk: the write-ahead log and its shards of checkpoints."""
