"""Benchmarks: ratios and medians on generated inputs. ``python -m tests.benchmarks.run --help``."""
