"""Ranks of one node tokenize each row once: they claim chunks, and read the replies of the others from shared memory.

Nothing here decides what is delivered. A reply depends on its rows alone, so it is the same whichever rank made it.
"""
