"""What :mod:`tests.benchmarks.probe` runs: each function measures one thing and returns its figures."""
