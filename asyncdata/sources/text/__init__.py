"""Rows in text files: JSON lines and arrays, also compressed."""
