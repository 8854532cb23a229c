"""Samples to batches: packers, length grouping, packs made online or planned beforehand, and collators.

Values in, values out, but for ``planned/worker.py``, which answers in a worker.
"""
