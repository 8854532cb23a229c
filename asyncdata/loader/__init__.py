"""The public loaders ``DataLoader`` and ``AsyncDataLoader``, with their settings, statistics and batch iterators.

The engine joins all folders below: it opens the source, starts the service's thread, and takes and restores snapshots.
In: the user's source and settings. Out: batches to the training loop. How rows are read, tokenized or packed is not
decided here, but in the folders below.
"""
