"""A store that fails in every way: what is delivered is D all the same, and each error names what failed and where."""

import json
import os
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

from asyncdata import Cache, DataLoader, JsonlSource
from asyncdata.errors import SourceError
from tests.faults.support.streaming import SHUFFLE, entry
from tests.support.combinations import each_value
from tests.support.fault_proxy import SPOILED, STATUSES, FaultProxy, Faults
from tests.support.faults import num_rounds, say
from tests.support.figures import record
from tests.support.http_server import HttpServer, Request, Response, ranged
from tests.support.loading import NEVER_S
from tests.support.tokenize_fns import id_and_text

pytest.importorskip("obstore")
pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(0)]

ENDS_WITH = {"403": ("AD324",), "404": ("AD322", "AD323"), "412": ("AD322",), "etag": ("AD322",), "whole": ("AD325",)}
"""The faults that another try cannot mend, and the errors of each: AD323 for an object that was not there at the start.

All others are tried again, unseen.
"""
KINDS = (*map(str, STATUSES), *SPOILED)
FAULTS = num_rounds(quick=4, full=40)  # of each kind, and of each way
NUM_ROWS = 500
SECRET = "token=abcdef0123456789"


class Run(NamedTuple):
    """What was delivered, the errors on the way, and how many workers were killed."""

    entries: list[list[int]]
    errors: list[str]
    kills: int


@pytest.fixture
def origin(path) -> Iterator[str]:
    def answer(request: Request) -> Response:
        return ranged(request, data, "v1") if request.path == "/rows.jsonl" else Response(404, {})

    data = path.read_bytes()
    with HttpServer(answer) as server:
        yield server.url


def make(source: object, num_workers: int = 0, **knobs: Any) -> DataLoader:
    settings = {"tokenize_fn": id_and_text, "shuffle": SHUFFLE, "timeout_s": NEVER_S}
    return DataLoader(source, num_workers=num_workers, **settings | knobs)


def stream(proxy: FaultProxy, num_faults: int, num_workers: int, chance: random.Random, **knobs: Any) -> Run:
    """Deliver until the proxy has made so many faults; after an error, resume in a new loader."""
    source = JsonlSource(f"{proxy.url}/rows.jsonl?{SECRET}", storage_options={"retry_timeout_s": NEVER_S})
    found: list[list[int]] = []
    errors, kills, state = [], 0, ""
    while proxy.num_faults < num_faults:
        try:
            loader = make(source, num_workers, **knobs)
        except SourceError as error:  # its first bytes are looked at
            errors.append(str(error))
            continue

        with loader:
            if state:
                loader.load_state_dict(json.loads(state))
            try:
                while proxy.num_faults < num_faults:
                    found += [entry(sample) for sample in loader.get_next_batch(chance.choice([1, 7, 32]))]
                    kills += _killed(loader, chance)
            except SourceError as error:
                errors.append(str(error))
            state = json.dumps(loader.state_dict())
    return Run(found, errors, kills)


def _killed(loader: DataLoader, chance: random.Random) -> bool:
    alive = [worker.pid for worker in loader.statistics().workers if worker.pid and worker.state in {"idle", "busy"}]
    if not alive or chance.random() > 0.03:
        return False

    with suppress(ProcessLookupError):
        os.kill(chance.choice(alive), signal.SIGKILL)
    return True


def is_named(error: str, kind: str) -> bool:
    has_code = error.startswith(ENDS_WITH.get(kind, ()))
    return has_code and "/rows.jsonl" in error and "bytes " in error and SECRET not in error


@pytest.mark.parametrize(("kind", "num_workers"), each_value(KINDS, [0, 2]))
def test_what_is_delivered_is_d_whatever_the_store_answers(path, origin, kind, num_workers):
    chance = random.Random(f"{kind} {num_workers}")
    share = 0.1 if kind in ENDS_WITH else 0.4
    with FaultProxy(origin, Faults((kind,), share=share, seed=chance.randrange(1 << 30))) as proxy:
        run = stream(proxy, FAULTS, num_workers, chance)
        faults = proxy.num_faults
    with make(str(path)) as loader:
        expected = [entry(sample) for sample in loader.get_next_batch(max(1, len(run.entries)))][: len(run.entries)]
    places = [tuple(item[1:4]) for item in run.entries]
    lost = len({tuple(item[1:4]) for item in expected} - set(places))
    repeated = len(places) - len(set(places))
    unnamed = sum(not is_named(error, kind) for error in run.errors)
    record("STORE", kind, faults=faults, kills=run.kills, lost=lost, repeated=repeated, unnamed=unnamed)
    say(f"{kind}: {faults} faults, {run.kills} kills, {len(run.entries)} samples, {len(run.errors)} errors, all named")

    assert run.entries == expected
    assert unnamed == 0, run.errors
    if num_workers == 0 or kind not in ENDS_WITH:  # the answer that a killed worker had is asked for again
        assert bool(run.errors) == (kind in ENDS_WITH), run.errors


def test_workers_that_are_killed_while_they_keep_blocks_leave_only_whole_ones(path, origin, tmp_path):
    """Two loaders share the blocks, whose limit is less than the data: what one keeps, the other removes."""
    cache = Cache(folder=str(tmp_path), remote_max_bytes=64 << 10)
    with FaultProxy(origin, Faults(("503", "cut"), share=0.3, seed=11)) as proxy, ThreadPoolExecutor(2) as threads:
        asked = [
            threads.submit(stream, proxy, 4 * FAULTS, 2, random.Random(number), cache=cache) for number in range(2)
        ]
        runs = [one.result() for one in asked]
        faults = proxy.num_faults
    with make(str(path)) as loader:
        expected = [entry(sample) for sample in loader.get_next_batch(max(len(run.entries) for run in runs))]
    kills = sum(run.kills for run in runs)
    record("STORE", "blocks on the disk", faults=faults, kills=kills, lost=0, repeated=0, unnamed=0)

    assert [run.entries for run in runs] == [expected[: len(run.entries)] for run in runs]
    assert [run.errors for run in runs] == [[], []]
    assert sum(-(-file.stat().st_size // 4096) * 4096 for file in tmp_path.glob("blocks/*/*")) <= 64 << 10
