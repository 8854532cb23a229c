"""Checks a resumable loader for the sixteen resume bugs that others had. It needs only Python, and no test runner.

From a clone, ``python -m tests.conformance package.module:Adapter``; ``lab.py`` says what an adapter is.
"""
