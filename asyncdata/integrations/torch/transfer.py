"""The way of a batch to where it is computed: arrays, page-locked memory, device."""

from __future__ import annotations

from typing import Any, Protocol

from asyncdata.batching.collators.torch_tensors import map_leaves, to_torch
from asyncdata.core.errors import ConfigError
from asyncdata.core.extras import missing_package

__all__ = ("HostTransfer", "StreamTransfer", "Transfer", "transfer_to")


class Transfer(Protocol):
    """Two halves of a copy; the device may compute between them."""

    def begin(self, batch: Any) -> Any:
        """Start it, and do not wait for it."""
        ...

    def finish(self, begun: Any) -> Any:
        """The batch, which may be used from now on."""
        ...


def transfer_to(device: Any, pin_memory: bool | None) -> Transfer:
    """The way to a device.

    :param device: a ``torch.device``, its name, or None: the batch stays where it is.
    :param pin_memory: None: for a CUDA device.
    :raises ConfigError: if there is no such device, or no torch.
    """
    try:
        import torch
    except ImportError as error:
        raise missing_package("a batch as tensors", "torch", error) from error

    place = None if device is None else torch.device(device)
    is_cuda = place is not None and place.type == "cuda"
    if is_cuda and not torch.cuda.is_available():
        raise ConfigError(f"device={str(device)!r} needs a CUDA device, and torch finds none")

    pins = is_cuda if pin_memory is None else pin_memory
    return StreamTransfer(place, pin_memory=pins) if is_cuda else HostTransfer(place, pin_memory=pins)


class HostTransfer:
    """To tensors on the CPU, pinned or not; or to a device that copies at once.

    :param device: None: they stay on the CPU.
    """

    def __init__(self, device: Any = None, *, pin_memory: bool = False) -> None:
        self._device = device
        self._pin_memory = pin_memory

    def begin(self, batch: Any) -> Any:
        """All of it."""
        import torch

        tensors = to_torch(batch, pin_memory=self._pin_memory)
        if self._device is None:
            return tensors

        return map_leaves(lambda leaf: leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf, tensors)

    def finish(self, begun: Any) -> Any:
        """Nothing is left to be done."""
        return begun


class StreamTransfer:
    """To a CUDA device, on a stream of its own: the copy runs while the device computes on another.

    :param device: a CUDA device.
    """

    def __init__(self, device: Any, *, pin_memory: bool = True) -> None:
        import torch

        # Which device "cuda" means may change later, and be another one in another thread.
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._pin_memory = pin_memory
        self._stream = torch.cuda.Stream(self._device)

    def begin(self, batch: Any) -> Any:
        """The batch on the device, and what happens when all of it is there."""
        import torch

        tensors = to_torch(batch, pin_memory=self._pin_memory)
        with torch.cuda.stream(self._stream):
            moved = map_leaves(self._moved, tensors)
            return moved, self._stream.record_event()

    def _moved(self, leaf: Any) -> Any:
        import torch

        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    def finish(self, begun: Any) -> Any:
        """The present stream waits for the copy; this process does not."""
        import torch

        moved, is_there = begun
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(is_there)

        def keep(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                leaf.record_stream(stream)  # else the memory could be given to the next copy while this one is read
            return leaf

        return map_leaves(keep, moved)
