"""The command line: ``asyncdata COMMAND``. The one folder that imports from all others; nothing imports from it.

``main`` parses the command line and runs a command. ``commands/`` has a module per command. ``inspection/`` looks at
single rows of the order, without a running loader. What several commands share (output, progress, options) lies beside
``main``.
"""
