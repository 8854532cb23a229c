"""What users hold: ``DataLoader`` and ``AsyncDataLoader``, their settings, the engine and its thread, statistics.

The engine joins all folders below: it opens the source, starts the service, and answers for snapshots.
"""
