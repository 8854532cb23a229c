"""What every other folder may use: errors, types, messages to workers, files that are whole or absent, logs.

Code here does not depend on the loader. A file belongs here when two folders need it and it has no home of its own.
"""

__version__ = "0.1.0"
