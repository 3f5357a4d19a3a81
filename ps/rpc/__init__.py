"""The gRPC service of a server."""
