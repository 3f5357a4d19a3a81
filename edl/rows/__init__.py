"""Embedding rows for readers: from live servers, and from exported files."""
