"""The snapshot: its contents, what must match when it is restored, and the comparison of two runs' digests.

In: the ledger of ``delivery`` and the state of ``batching``, collected by the loader's engine. Out: a dict or a file.
Only plain data is written and read. The trainer's own checkpoint is not handled here.
"""
