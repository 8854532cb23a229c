"""Copies a batch to its device: arrays, page-locked memory, device."""

from __future__ import annotations

from typing import Any, Protocol

from asyncdata.batching.collators.torch_tensors import map_leaves, to_torch
from asyncdata.core.errors import ConfigError
from asyncdata.core.extras import missing_package

__all__ = ("HostTransfer", "StreamTransfer", "Transfer", "transfer_to")


class Transfer(Protocol):
    """A copy in two halves, between which the device may compute."""

    def begin(self, batch: Any) -> Any:
        """Start the copy, without waiting for it."""
        ...

    def finish(self, begun: Any) -> Any:
        """The batch, ready to use."""
        ...


def transfer_to(device: Any, pin_memory: bool | None) -> Transfer:
    """The transfer to a device.

    :param device: a ``torch.device``, its name, or None: the batch stays on the CPU.
    :param pin_memory: None: True for a CUDA device.
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
    """Copies to tensors on the CPU, pinned or not; or to a device with blocking copies.

    :param device: None: the CPU.
    """

    def __init__(self, device: Any = None, *, pin_memory: bool = False) -> None:
        self._device = device
        self._pin_memory = pin_memory

    def begin(self, batch: Any) -> Any:
        """Do the whole copy."""
        import torch

        tensors = to_torch(batch, pin_memory=self._pin_memory)
        if self._device is None:
            return tensors

        return map_leaves(lambda leaf: leaf.to(self._device) if isinstance(leaf, torch.Tensor) else leaf, tensors)

    def finish(self, begun: Any) -> Any:
        """Do nothing: the copy is complete."""
        return begun


class StreamTransfer:
    """Copies to a CUDA device on a separate stream, while the device computes on another.

    :param device: a CUDA device.
    """

    def __init__(self, device: Any, *, pin_memory: bool = True) -> None:
        import torch

        # The device of "cuda" may change later, and differ between threads.
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._pin_memory = pin_memory
        self._stream = torch.cuda.Stream(self._device)

    def begin(self, batch: Any) -> Any:
        """The batch on the device, and the event after its copy."""
        import torch

        tensors = to_torch(batch, pin_memory=self._pin_memory)
        with torch.cuda.stream(self._stream):
            moved = map_leaves(self._moved, tensors)
            return moved, self._stream.record_event()

    def _moved(self, leaf: Any) -> Any:
        import torch

        return leaf.to(self._device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf

    def finish(self, begun: Any) -> Any:
        """Let the current stream wait for the copy, without blocking this process."""
        import torch

        moved, is_there = begun
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(is_there)

        def keep(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                leaf.record_stream(
                    stream
                )  # otherwise the memory could be reused by the next copy while this one is read
            return leaf

        return map_leaves(keep, moved)
