"""Batches as torch tensors. Torch is imported when it is needed, and only here."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import needing


def to_torch(batch: Any, *, pin_memory: bool = False) -> Any:
    """``batch`` with a CPU tensor for each array, of the same shape and dtype; all else stays as it is.

    :param batch: an array, or dicts, lists and tuples of them. Without pinning the tensors share the arrays' memory,
        unless an array is read-only.
    :param pin_memory: copy into page-locked memory, from which ``tensor.to(device, non_blocking=True)`` need not wait.
        Tensors are copied as well.
    :raises ConfigError: if memory is to be pinned where there is no CUDA device; if there is no torch.
    """
    with needing("a batch as tensors", "torch"):
        import torch

    if pin_memory:
        need_cuda("pin_memory=True")

    def convert(value: Any) -> Any:
        tensor = _tensor(value) if isinstance(value, np.ndarray) else value
        return tensor.pin_memory() if pin_memory and isinstance(tensor, torch.Tensor) else tensor

    return map_leaves(convert, batch)


def need_cuda(what: str) -> None:
    """Refuse ``what``, a setting, if there is no CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"{what} needs a CUDA device, and torch finds none")


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` of each value that is no dict, list or tuple, in the same dicts, lists and tuples."""
    if isinstance(value, dict):
        return {name: map_leaves(function, item) for name, item in value.items()}

    if isinstance(value, list):
        return [map_leaves(function, item) for item in value]

    if isinstance(value, tuple):
        items = [map_leaves(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)

    return function(value)


def _tensor(array: np.ndarray[Any, np.dtype[Any]]) -> Any:
    import torch

    # A tensor must be writable, and cannot have negative strides.
    is_shared = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    tensor = torch.from_numpy(array if is_shared else array.copy())
    kind: Any = array.dtype.metadata or {}
    return tensor.view(torch.bfloat16) if kind.get("dtype") == "bfloat16" else tensor


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
