"""The command line: ``asyncdata COMMAND``. The one folder that imports from all others; nothing imports from it.

``main`` has the table of all commands and options, parses the command line and runs a command; ``options`` converts
them to the library's arguments; ``output`` writes. ``files``, ``inspect``, ``machine``, ``report`` and ``run`` have the
commands. ``rows`` finds single rows of the order, and ``shown_text`` shows them as text, with the tokens that are
trained.
"""
