"""The master's gRPC side: the streams of its workers, and the calls of people."""
