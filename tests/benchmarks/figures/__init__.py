"""The figures, a module for each group of them; a figure is a function that reports its rows to a ``Bench``."""
