"""For programs of tests that are killed in the middle of a write."""

from __future__ import annotations

__all__ = ("TORN_WRITES",)

TORN_WRITES = """
import os, signal
write, num_writes = os.pwrite, 0
def torn_write(fd, data, offset):
    global num_writes
    num_writes += 1
    if num_writes == stop:
        write(fd, bytes(data[:torn]), offset)
        os.kill(os.getpid(), signal.SIGKILL)
    return write(fd, data, offset)
os.pwrite = torn_write
"""
"""The process dies in its write number ``stop``, of which ``torn`` bytes are written; both are the program's names."""
