"""Stands before the index's torchvision, which is built for CUDA, beside a torch for CPUs, and becomes it.

Its operators are in a library that is not loaded then. Those that its import names are declared before.
"""

import importlib
import sys
from pathlib import Path

import torch

library = torch.library.Library("torchvision", "DEF")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

folder = str(Path(__file__).parents[1])
del sys.modules["torchvision"]
sys.path.remove(folder)
importlib.invalidate_caches()
real = importlib.import_module("torchvision")
sys.path.insert(0, folder)
real.declared = library
