"""The callbacks of a loader's service, each with a loader that has it called: if one moves, a line here follows it."""

from __future__ import annotations

from typing import Any, NamedTuple

from asyncdata import Cache, Outcomes, PassRate, RowShuffle, SoftPacking
from tests.support.planned_media import two_phases

__all__ = ("CALLBACKS", "FULL", "REPLY_TO_THE_INDEX", "Way")

PREFETCH = "asyncdata.prefetch"
REPLY_TO_THE_INDEX = f"{PREFETCH}.row_index.builder:Indexer._on_reply"
FULL = {"shuffle": "full", "cache": Cache(folder="")}
SLIME = FULL | {"shuffle": RowShuffle(method="slime")}
SOLVED = Outcomes(policy=PassRate(drop_above=0.9))
PLANNED = FULL | {"packing": SoftPacking(max_length=16), "plan_packs": True}


class Way(NamedTuple):
    """How a loader is made that has the callback called, and at which of its calls it fails."""

    knobs: dict[str, Any] = {}
    source: str = "rows"
    at: tuple[int, ...] = (1,)


CALLBACKS: dict[str, Way] = {
    "asyncdata.loader.autotune:Tuner._on_change": Way({"num_workers": None, "limits": {"max_workers": 2}}, at=(1, 9)),
    "asyncdata.loader.service:Service._begin": Way(),
    f"{PREFETCH}.canaries:Canaries._on_scanned": Way(),
    f"{PREFETCH}.canaries:Canaries._on_tokenized": Way(),
    f"{PREFETCH}.media_loader:MediaLoader._on_reply": Way({"tokenize_fn": two_phases}, at=(1, 9)),
    f"{PREFETCH}.mixture_producer:MixtureProducer._bytes_limit": Way(source="mix", at=(1, 9)),
    f"{PREFETCH}.mixture_producer:MixtureProducer._may_decide": Way({"outcomes": SOLVED}, source="mix"),
    f"{PREFETCH}.mixture_producer:MixtureProducer._note": Way(source="mix", at=(1, 9)),
    f"{PREFETCH}.mixture_producer:MixtureProducer.pump": Way(source="mix", at=(1, 9)),
    f"{PREFETCH}.producer:Producer._on_tokenized": Way(at=(1, 4)),
    f"{PREFETCH}.producer:Producer.pump": Way(at=(1, 4, 9)),
    REPLY_TO_THE_INDEX: Way(FULL),
    f"{PREFETCH}.windows.block_windows:BlockWindows._on_scanned": Way(at=(1, 3)),
    f"{PREFETCH}.windows.indexed_windows:IndexedWindows._fill_waiting": Way(FULL),
    f"{PREFETCH}.windows.indexed_windows:IndexedWindows._on_permuted": Way(SLIME),
    f"{PREFETCH}.windows.planned_epochs:PlannedRows._on_reply": Way(PLANNED, at=(1, 2)),
    f"{PREFETCH}.windows.stream_windows:StreamWindows._read": Way(source="stream"),
}
