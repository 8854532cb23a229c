"""Samples to packs: which pieces of which samples share one sequence. Values in, values out."""
