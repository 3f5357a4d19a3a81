"""Connections: TLS, listeners, the readiness probe, and a client of the master."""
