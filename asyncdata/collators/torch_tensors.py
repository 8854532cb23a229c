"""Batches as torch tensors. Torch is imported when it is needed, and only here."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from asyncdata.errors import ConfigError

__all__ = ("sequence_context", "to_torch")


def to_torch(batch: Any, *, pin_memory: bool = False) -> Any:
    """``batch`` with a CPU tensor for each array, of the same shape and dtype; all else stays as it is.

    :param batch: an array, or dicts and lists of them. Without pinning the tensors share the arrays' memory.
    :param pin_memory: copy into page-locked memory, from which ``tensor.to(device, non_blocking=True)`` need not wait.
    :raises ConfigError: if memory is to be pinned where there is no CUDA device.
    """
    import torch

    if pin_memory and not torch.cuda.is_available():
        raise ConfigError("pin_memory=True needs a CUDA device, and torch finds none")

    return _converted(batch, pin_memory=pin_memory)


def _converted(value: Any, *, pin_memory: bool) -> Any:
    import torch

    if isinstance(value, dict):
        return {name: _converted(item, pin_memory=pin_memory) for name, item in value.items()}

    if isinstance(value, list):
        return [_converted(item, pin_memory=pin_memory) for item in value]

    if not isinstance(value, np.ndarray):
        return value

    tensor = torch.from_numpy(value)
    return tensor.pin_memory() if pin_memory else tensor


def sequence_context(fields: dict[str, Any]) -> Any:
    """XTuner's ``SequenceContext`` of these fields, as tensors.

    :raises ConfigError: if XTuner cannot be imported.
    """
    try:
        kind = importlib.import_module("xtuner.v1.data_proto").SequenceContext
    except ImportError as error:
        raise ConfigError(
            f'output="sequence_context" needs XTuner, which cannot be imported ({error}); output="tensors" gives dicts'
        ) from error

    return kind(**to_torch(fields))
