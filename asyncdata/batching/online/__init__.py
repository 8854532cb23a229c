"""Packs samples as they come, without a pass over the data."""
