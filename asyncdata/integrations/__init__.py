"""Adapters for training frameworks: each replaces a framework's data source by a loader of this library.

In: the framework's arguments and rows. Out: its own sample and batch types, and its checkpoint files. A framework is
imported inside functions only. Nothing below this folder knows a framework.
"""
