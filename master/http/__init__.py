"""The master's HTTP server: health and metrics."""
