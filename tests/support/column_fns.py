"""Tokenize functions that declare columns, of one phase and of two, and what each row's must be."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import msgspec
import numpy as np

from asyncdata import Column
from asyncdata.tokenization.rows import RowFault

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


SIZE = Column("size", "int64", "sample")
PIXELS = Column("pixels", "float32", "item", (4,), phase="load")


class NumberedMedia(msgspec.Struct, frozen=True, kw_only=True):
    """Rows ``{"id": 3, "items": 2}`` to samples of ``id % 7 + 1`` tokens and ``items`` rows of pixels, or 3.

    :param log: a file to which each load writes the row's id.
    :param gone: a file with the ids of rows whose media cannot be loaded.
    """

    log: str = ""
    gone: str = ""
    columns = (SIZE, PIXELS)

    def resolve(self) -> NumberedMedia:
        return self

    def fingerprints(self) -> dict[str, str]:
        return {"tokenize_fn": "numbered media"}

    def settings(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)

    def open(self) -> _Opened:
        return _Opened(self)


class _Opened:
    def __init__(self, fn: NumberedMedia) -> None:
        self._fn = fn

    def __call__(self, rows: Any, out: Any) -> None:
        for number, raw in enumerate(rows):
            row = json.loads(bytes(raw))
            tokens = _tokens(row)
            items = row.get("items", 3)
            media = {"media": json.dumps({"pixels": items}).encode()} if items else {}
            out.keep(
                number, tokens, **{SIZE.key: SIZE.encode(items, 0)}, **media, spans=f"[[0,{len(tokens)}]]".encode()
            )

    def load(self, rows: Any, out: Any) -> None:
        for number, raw in enumerate(rows):
            row = json.loads(bytes(raw))
            out.progress(number)
            if self._fn.log:
                with open(self._fn.log, "a") as file:
                    file.write(f"{row['id']}\n")
            fault = row.get("fault")
            if os.path.exists(self._fn.gone) and str(row["id"]) in open(self._fn.gone).read().split():
                fault = "bad"
            if fault == "dies":
                os._exit(3)
            if fault == "raises":
                raise ValueError("no picture")
            if fault == "slow":
                time.sleep(0.05)
            if fault == "bad":
                out.fail(number, RowFault("AD456", "picture 1 cannot be decoded", bytes(raw)))
            else:
                tokens = [0] if fault == "other" else _tokens(row)
                out.keep(number, tokens, **{PIXELS.key: PIXELS.encode(media_of(row["id"], row.get("items", 3)), 0)})


def _tokens(row: dict[str, Any]) -> list[int]:
    return [row["id"]] * (row["id"] % 7 + 1)


def two_phases(row: dict[str, Any]) -> dict[str, Any]:
    """A function without columns of its plan; its rows may say what is wrong with them."""
    return {"input_ids": [row["id"]] * 3, "labels": [row["id"]] * 3, "media": row.get("media", {"pixels": 2})}


def _load(row: dict[str, Any], plan: dict[str, Any]) -> Any:
    if row.get("fault") == "raises":
        raise ValueError("no picture")
    return row.get("loaded", {"pixels": media_of(plan["input_ids"][0], 2)})


two_phases.columns = (PIXELS,)  # type: ignore[attr-defined]
two_phases.load = _load  # type: ignore[attr-defined]


def without_load(row: dict[str, Any]) -> dict[str, Any]:
    """As :class:`NumberedMedia`, by a function without a load."""
    tokens, items = _tokens(row), row.get("items", 3)
    return {"input_ids": tokens, "labels": tokens, "size": items, "pixels": media_of(row["id"], items)}


without_load.columns = (SIZE, PIXELS)  # type: ignore[attr-defined]


def media_of(number: int, items: int) -> Any:
    return np.arange(4 * items, dtype=np.float32).reshape(items, 4) / 64 + number


def write_rows(path: Any, faults: dict[int, str] | None = None, num_rows: int = 60, items: int = 3) -> str:
    """A file of rows, each with so many items, but every fifth with none."""
    faults = faults or {}
    rows = ({"id": n, "items": items if n % 5 else 0, "fault": faults.get(n)} for n in range(num_rows))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)
