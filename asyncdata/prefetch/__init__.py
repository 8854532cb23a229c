"""Keeps the workers busy: the producer opens windows of rows, sends their rows to workers, and fills the channel.

Blocks come from ``sources``, the order from ``order``; chunks of samples go to ``delivery``.
"""
