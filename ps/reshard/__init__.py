"""Rows move between servers when their number changes."""
