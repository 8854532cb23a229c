"""What runs that come from XTuner need: its packs, its batches and its tokenize functions. The public import path."""

from __future__ import annotations

from asyncdata.batching.packed_collator import XTunerCollator
from asyncdata.batching.xtuner_packing import PresetPacking, XTunerPacking
from asyncdata.tokenization.xtuner_function import XTunerTokenizeFn

__all__ = ("PresetPacking", "XTunerCollator", "XTunerPacking", "XTunerTokenizeFn")
