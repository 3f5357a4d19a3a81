"""The master's gRPC server: the streams of its workers, and the calls of commands."""
