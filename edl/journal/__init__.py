"""The journal's format, and the proof from it that each record counted once."""
