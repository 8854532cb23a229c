"""Inspects single rows of the order D: their location, the samples that they become, and the trained tokens."""
