"""A decoder-only transformer, small enough to be trained on a CPU: what the training examples train."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

IGNORE = -100


class TinyLM(nn.Module):
    """Two layers, rotary positions, weights of input and output shared.

    :param max_positions: no position id may be as large.
    """

    def __init__(self, vocabulary: int, max_positions: int, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=0.05)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.norm = nn.LayerNorm(width)
        self.register_buffer("rotation", rotation(max_positions, width // Block.NUM_HEADS), persistent=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Logits of shape (rows, width, vocabulary).

        :param mask: bool of shape (rows, 1, width, width): who sees whom.
        """
        hidden, rotation = self.embedding(input_ids), self.rotation[position_ids].unsqueeze(1)
        for block in self.blocks:
            hidden = block(hidden, rotation, mask)
        return self.norm(hidden) @ self.embedding.weight.T


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    NUM_HEADS = 2

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor, rotation: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        heads = self.project(self.norms[0](hidden)).unflatten(-1, (3, self.NUM_HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(rotated(query, rotation), rotated(key, rotation), value, attn_mask=mask)
        hidden = hidden + self.out(seen.transpose(1, 2).flatten(2))
        return hidden + self.perceptron(self.norms[1](hidden))


def rotation(max_positions: int, size: int) -> torch.Tensor:
    """Cosines and sines of rotary positions: float of shape (max_positions, 2, size / 2)."""
    angles = torch.outer(torch.arange(max_positions), 10000.0 ** (-torch.arange(0, size, 2) / size))
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def rotated(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    cosine, sine = rotation.unbind(-2)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat([left * cosine - right * sine, left * sine + right * cosine], dim=-1)


def packed_mask(cu_seqlens: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Each token sees those before it in its own segment, from where segments begin in the rows laid end to end."""
    lengths = cu_seqlens.diff()
    segments = torch.repeat_interleave(torch.arange(len(lengths)), lengths).view(num_rows, -1)
    return (segments.unsqueeze(-1) == segments.unsqueeze(-2)).tril().unsqueeze(1)


def causal_mask(num_rows: int, width: int) -> torch.Tensor:
    """Each token sees those before it in its own row. So padding at the right is seen by nothing that counts."""
    return torch.ones(width, width, dtype=torch.bool).tril().expand(num_rows, 1, width, width)


def loss_of(logits: torch.Tensor, shifted_labels: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the tokens that are trained on."""
    num_trained = (shifted_labels != IGNORE).sum().clamp(min=1)
    total = F.cross_entropy(logits.flatten(0, 1), shifted_labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total / num_trained
