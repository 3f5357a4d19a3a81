"""The worker's session with its master: the stream, and what is known on both sides of it."""
