"""What the trainer reported of each row: the memory, and the policies that leave rows out of an epoch.

The way of one score::

    report -> memory: the sums of its row -> state_dict: the whole memory
                 |
                 +-> policy, at an epoch's start -> excluded rows -> the channel passes over them: counted as drops

Nothing here knows a loader: values in, values out.
"""
