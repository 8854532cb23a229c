"""The callbacks of a loader's service, each with a loader that has it called: if one moves, a line here follows it."""

from typing import Any, NamedTuple

from asyncdata import Cache, Outcomes, PassRate, RowShuffle, SoftPacking
from tests.support.planned_media import two_phases

__all__ = ("CALLBACKS", "FULL", "REPLY_TO_THE_INDEX", "Way")

READ_AHEAD = "asyncdata.read_ahead"
REPLY_TO_THE_INDEX = f"{READ_AHEAD}.indexer:Indexer._take"
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
    "asyncdata.loader.autotune:Tuner.look": Way({"num_workers": None, "limits": {"max_workers": 2}}, at=(1, 9)),
    "asyncdata.loader.service:Service._begin": Way(),
    "asyncdata.workers.changes:Look.again": Way(at=(1, 4, 9)),
    f"{READ_AHEAD}.source:Canaries._tokenized": Way(),
    "asyncdata.loader.loader_media:LoaderMedia._ask": Way({"tokenize_fn": two_phases}, at=(1, 9)),
    "asyncdata.delivery.merger:PartQueue.room": Way(source="mix", at=(1, 9)),
    f"{READ_AHEAD}.mixture:MixtureReadAhead.is_awaited": Way({"outcomes": SOLVED}, source="mix"),
    f"{READ_AHEAD}.mixture:MixtureReadAhead._note": Way(source="mix", at=(1, 9)),
    f"{READ_AHEAD}.mixture:MixtureReadAhead._ask_due": Way(source="mix", at=(1, 9)),
    f"{READ_AHEAD}.source:ReadAhead._on_tokenized": Way(at=(1, 4)),
    f"{READ_AHEAD}.source:ReadAhead._send_next": Way(at=(1, 4, 9)),
    REPLY_TO_THE_INDEX: Way(FULL),
    f"{READ_AHEAD}.windows:BlockWindows._scan": Way(at=(1, 3)),
    f"{READ_AHEAD}.indexed_windows:IndexedWindows.more": Way(FULL),
    f"{READ_AHEAD}.indexed_windows:IndexedWindows._permutation": Way(SLIME),
    f"{READ_AHEAD}.indexed_windows:PlannedRows._packs_of": Way(PLANNED, at=(1, 2)),
    f"{READ_AHEAD}.stream_windows:StreamWindows._read": Way(source="stream"),
}
