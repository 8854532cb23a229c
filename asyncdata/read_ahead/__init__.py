"""Keeps the workers busy: coroutines open windows of rows, send their rows to workers, and fill the channel.

In: blocks from ``sources``, the order from ``order``, replies from ``workers``. Out: chunks of samples to ``delivery``.
Here is also the row index. Code here delivers nothing to the caller and knows no batches.
"""
