"""Tokenize functions that declare columns, and what each row's must be."""

from typing import Any

import numpy as np

from asyncdata import Column

__all__ = ("COLUMNS", "columned", "plain", "values_of")

COLUMNS = (
    Column("top", "int64", shape=(2,), pad=-1),
    Column("loss_weights", "float32", follows="labels"),
    Column("half", "bfloat16"),
    Column("size", "int16", "sample", (2,)),
    Column("pixels", "uint8", "item", (3,)),
    Column("rare", "float64", "sample", pad=-1, optional=True),
)


def values_of(number: int) -> dict[str, Any]:
    """The columns of row ``number``, as NumPy arrays."""
    tokens = np.arange(1, 2 + number % 5) + 10 * number
    found = {
        "top": np.stack([tokens, tokens + 1], 1),
        "loss_weights": np.where(tokens % 2, 0.25, 0).astype(np.float32),
        "half": ((tokens % 128).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16),  # exact: up to 8 bits
        "size": np.array([number, -number], np.int16),
        "pixels": np.full((number % 3, 3), number % 256, np.uint8),
    }
    return found | ({"rare": np.float64(number)} if number % 4 == 0 else {})


def columned(row: dict[str, Any]) -> dict[str, Any]:
    """A sample of up to five tokens, with columns of all kinds; every seventh row is dropped."""
    number = row["id"]
    if number % 7 == 3:
        return "seventh"  # type: ignore[return-value]

    values = values_of(number) | {"half": (np.arange(1, 2 + number % 5, dtype=np.float32) + 10 * number) % 128}
    if number % 2:
        values |= {"top": values["top"].tolist(), "pixels": values["pixels"].tobytes() if number % 3 == 1 else []}
    if number % 6 == 1 or number % 6 == 5:
        values["pixels"] = values_of(number)["pixels"].tolist()
    return {"input_ids": [1 + place + 10 * number for place in range(1 + number % 5)], "id": number, **values}


columned.columns = COLUMNS  # type: ignore[attr-defined]
columned.version = 1  # type: ignore[attr-defined]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """The same without columns."""
    return {"input_ids": [row["id"]], "id": row["id"]}
