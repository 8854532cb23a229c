"""Keeps the workers busy: the producer opens windows of rows, sends their rows to workers, and fills the channel.

In: blocks from ``sources``, the order from ``order``, replies from ``workers``. Out: chunks of samples to ``delivery``.
Here is also the row index. Code here delivers nothing to the caller and knows no batches.
"""
