"""Frames as the video processors of transformers take them: tensors of torch."""

from __future__ import annotations

from typing import Any


def frames_without_data(num_frames: int, height: int, width: int) -> Any:
    """Frames that have a shape, uint8 of (num_frames, 3, height, width), and no memory."""
    import torch

    return torch.empty((num_frames, 3, height, width), dtype=torch.uint8, device="meta")


def tensor_of(frames: Any) -> Any:
    """A view of an array of shape (num_frames, height, width, 3), with the colours second."""
    import torch

    return torch.from_numpy(frames).permute(0, 3, 1, 2)
