"""Converts tensors to arrays and images to bytes, so that a snapshot can store values that contain them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from asyncdata.core.plain_values import MAX_DEPTH
from asyncdata.integrations.slime.image_values import IMAGE, image_from_plain, image_to_plain, is_image

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ("tensors_from_plain", "tensors_to_plain")

_TENSOR, _KEPT = "__tensor__", "__kept__"
_OURS = frozenset((_TENSOR, _KEPT, IMAGE))
_ATOMS = frozenset((str, int, float, bool, type(None)))


def tensors_to_plain(value: Any, path: str, depth: int = 0) -> Any:
    """``value`` with each tensor in it as ``{"__tensor__": [dtype, shape, bytes]}``, bytes being a uint8 array.

    A Pillow image becomes ``{"__image__": [...]}``.

    The bits of a tensor's numbers are stored; its device and ``requires_grad`` are not. The bytes of a contiguous
    tensor on the CPU are not copied.

    :param path: the path of the value, for errors.
    :raises TypeError: for a tensor without a plain block of numbers: a sparse, quantized, or meta tensor.
    """
    if isinstance(value, dict | list | tuple) and depth <= MAX_DEPTH:  # to_builtins refuses deeper values
        return _items_to_plain(value, path, depth + 1)

    # Without torch imported, there are no tensors.
    if isinstance(value, getattr(sys.modules.get("torch"), "Tensor", ())):
        return {_TENSOR: _numbers(value, path)}

    return {IMAGE: image_to_plain(value)} if is_image(value) else value


def _items_to_plain(value: dict[Any, Any] | list[Any] | tuple[Any, ...], path: str, depth: int) -> Any:
    if isinstance(value, dict):
        packed = {key: tensors_to_plain(item, f"{path}.{key}", depth) for key, item in value.items()}
        return {_KEPT: packed} if _OURS & packed.keys() else packed

    if _ATOMS.issuperset(map(type, value)):
        return value

    items = [tensors_to_plain(item, f"{path}[{number}]", depth) for number, item in enumerate(value)]
    return tuple(items) if isinstance(value, tuple) else items


def _numbers(tensor: torch.Tensor, path: str) -> list[Any]:
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "meta" if tensor.is_meta else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise TypeError(f"{path} is a tensor without a plain block of numbers ({kind}), which a snapshot cannot hold")

    dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    array = dense.reshape(-1).view(torch.uint8).numpy()
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), array]


def tensors_from_plain(value: Any) -> Any:
    """The inverse of :func:`tensors_to_plain`, with tensors on the CPU."""
    if isinstance(value, dict):
        if _TENSOR in value:
            return _tensor(*value[_TENSOR])

        if IMAGE in value:
            return image_from_plain(*value[IMAGE])

        return {key: tensors_from_plain(item) for key, item in value.get(_KEPT, value).items()}

    if isinstance(value, list | tuple) and not _ATOMS.issuperset(map(type, value)):
        items = [tensors_from_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items

    return value


def _tensor(dtype: str, shape: list[int], numbers: np.ndarray[Any, np.dtype[np.uint8]]) -> torch.Tensor:
    import torch

    kind = getattr(torch, dtype)
    if not numbers.size:
        return torch.empty(shape, dtype=kind)  # an empty array cannot be viewed as another type

    return torch.from_numpy(numbers).view(kind).reshape(shape)
