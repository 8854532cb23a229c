"""What every other folder may use: errors, types, messages to workers, files that are whole or absent, logs.

Nothing here knows what a loader is. A file belongs here when two folders need it and it has no home of its own.
"""
