"""Parameter servers: the processes that keep the rows of embedding tables."""
