"""Models that run: each a small module with plain functions."""
