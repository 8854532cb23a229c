"""What was delivered, and what comes next: the channel, the ledger, the coordinator, the rollout buffer, its filters.

Chunks of samples come in from ``prefetch``; groups go out to the loader. Everything that a snapshot must know of
progress is in the ledger. Nothing here reads a file of data or starts a process.
"""
