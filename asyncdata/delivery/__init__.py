"""Delivers samples in order: the channel (read-ahead), the ledger (progress), the coordinator, the rollout buffer.

In: chunks of samples from ``read_ahead``, and groups that the trainer gives back. Out: groups of samples to the loader.
All progress that a snapshot needs is in the ledger. Code here reads no data file, except a bad row's line for its
error, and starts no process.
"""
