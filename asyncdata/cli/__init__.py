"""The command line: ``asyncdata COMMAND``. The one folder that imports from all others; nothing imports from it.

``main`` parses the command line and runs a command. ``arguments`` has the table of all commands and options.
``commands/`` has a module per command. ``inspection/`` shows single rows of the order, without a running loader. The
other modules are shared by several commands: options, output, progress.
"""
