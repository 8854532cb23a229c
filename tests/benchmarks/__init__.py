"""Benchmarks: ratios and medians on generated inputs.

``python -m tests.benchmarks.run --help`` takes all figures, S1 to S20; what they mean stands in
``docs/explanation/measurements.md``. A figure is a function of :mod:`figures`, which asks a ``Bench`` of
:mod:`framework` for :mod:`probes` of ours and for the :mod:`contestants`, whose peers lie in :mod:`peers`; each is run
in a process of its own. :mod:`plots` shows what was kept. The rest are programs of their own: beside slime and XTuner.
"""
