"""Packs made as samples come, without a pass over the data."""
