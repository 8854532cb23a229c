"""Turns samples into batches: packers, length grouping, packs made online or planned before, and collators.

In: samples, or only their lengths. Out: packs in delivery order, and the arrays of a batch. Code here is free of files,
threads and waiting; only the making of plans, in ``planned.py``, runs in a worker.
"""
