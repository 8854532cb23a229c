"""The snapshot: its contents, what must match when it is restored, and whether two runs saw the same stream."""
