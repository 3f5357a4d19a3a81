"""Embedding tables in a model: lookups, rows on servers, rows in a checkpoint."""
