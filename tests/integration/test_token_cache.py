"""The token cache changes the time and nothing else, of whatever kind the data is and whatever becomes of the cache.

Each test compares a loader that has a cache with one that has none, over blocks of lines, orders of single rows, and
streams. What the folder of a cache holds is in ``test_token_cache_folder``.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import structlog
from tokenizers import Tokenizer

from asyncdata import BadRowError, DataLoader, HardPacking, JsonlSource, PromptTokenizeFn, RowShuffle, Shuffle
from asyncdata import XTunerPacking as XTuner
from tests.support import cached
from tests.support.cached import WINDOWS, Delivered, assert_same, facts, loader, segments
from tests.support.combinations import each_value
from tests.support.loading import SHUFFLE, write_rows
from tests.support.ranks import settled
from tests.support.sources import KINDS, make_rows

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache import row_cache

STREAMS = ("gzip", "array", "two files")
ROWS = {"blocks": 400, "rows": 300, **dict.fromkeys(STREAMS, 300)}
SHUFFLES: dict[str, Any] = {"blocks": SHUFFLE, "rows": "full", **dict.fromkeys(STREAMS, WINDOWS)}
IN_ORDER = Shuffle(enabled=False, block_bytes=1024, window_blocks=8)
NUM_CANARIES = 8
"""Rows that are tokenized at every start, whatever is cached."""


class Data(NamedTuple):
    """Data of one kind, and the folder of its cache."""

    kind: str
    path: Any
    cache: Path

    @property
    def num_rows(self) -> int:
        return ROWS[self.kind]

    def open(self, cache: Path | None, path: Any = None, **knobs: Any) -> DataLoader:
        return loader(self.path if path is None else path, cache, **({"shuffle": SHUFFLES[self.kind]} | knobs))

    def plain(self, num_epochs: int = 1, **knobs: Any) -> Delivered:
        """Without a cache."""
        return Delivered(self.open(None, epochs=num_epochs, **knobs), num_epochs)

    def fill(self, **knobs: Any) -> Delivered:
        """With the cache, until all is stored."""
        return Delivered(self.open(self.cache, **knobs), settle=True)

    def read(self, **knobs: Any) -> Delivered:
        return Delivered(self.open(self.cache, **knobs))


@pytest.fixture
def data(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    """Of the kind that the parameter says, in small segments."""
    kind = getattr(request, "param", "blocks")
    monkeypatch.setattr(row_cache, "_MAX_ROWS", 32)
    monkeypatch.setattr(row_cache, "_PAGE_ROWS", 64)
    stream = cached.write_stream if kind in STREAMS else lambda _, *where: cached.write_lines(*where)
    return Data(kind, stream(kind, tmp_path, ROWS[kind]), tmp_path / "cache" / "tokens")


def of(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("data", kinds, indirect=True)


def of_each(names: str, quick: list[tuple[Any, ...]], more: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Kinds, and what each is tried with: always, and in the thorough selection."""
    values = [*quick, *(pytest.param(*each, marks=pytest.mark.thorough) for each in more)]
    return pytest.mark.parametrize(f"data, {names}", values, indirect=["data"])


thorough = pytest.mark.thorough
EVERY_KIND = of("blocks", "rows", *(pytest.param(kind, marks=thorough) for kind in STREAMS))
BLOCKS_AND_ROWS = of("blocks", pytest.param("rows", marks=thorough))
ORDERS_OF_ROWS = [
    RowShuffle(only_kept=True),
    RowShuffle(method="slime"),
    RowShuffle(method="none"),
    RowShuffle(part="train", train_ratio=0.7),
    RowShuffle(first=30, stop=200),
]


@of_each(
    "shuffle",
    [("blocks", SHUFFLE), ("rows", "full"), ("gzip", WINDOWS)],
    [*(("rows", order) for order in ORDERS_OF_ROWS), *itertools.product(("blocks", "array", "two files"), [IN_ORDER])],
)
def test_a_later_run_reads_every_row_from_the_cache_and_delivers_the_same(data, shuffle):
    expected = data.plain(shuffle=shuffle)

    first = data.fill(shuffle=shuffle)
    cached.CALLS.clear()
    second = data.read(shuffle=shuffle)

    assert_same(first, expected)
    assert_same(second, expected)
    assert first.cached == [0]
    assert cached.CALLS.total() <= NUM_CANARIES, "no other row is tokenized"
    if data.kind == "rows":
        assert second.cached[0] >= len(expected.samples) > 100, "the order may leave out rows"
    else:
        assert second.cached == [data.num_rows]


@thorough
@of(*ROWS)
@pytest.mark.parametrize("digest", ["positions", "tokens"])
def test_workers_read_it_too_and_the_digest_is_that_of_what_was_tokenized(data, digest):
    def run(where: Path | None) -> tuple[list[Any], Any, int]:
        with data.open(where, num_workers=2, digest=digest) as opened:
            found = [facts(sample) for batch in opened for sample in batch]
            if where is not None:
                cached.wait_until_stored(opened)
            return found, opened.state_dict()["counters"]["digest"], opened.statistics().cached_rows_total

    expected = run(None)

    assert run(data.cache) == expected
    assert run(data.cache) == (*expected[:2], data.num_rows)


@of_each(
    "seed, shuffle",
    [("rows", 7, "full")],
    [
        ("blocks", 7, SHUFFLE),
        ("blocks", 42, Shuffle(block_bytes=1024, window_blocks=9)),
        ("rows", 42, RowShuffle(method="slime")),
        *itertools.product(STREAMS, [7], [Shuffle(block_bytes=1024, window_blocks=3)]),
    ],
)
def test_another_order_reads_the_same_cache(data, seed, shuffle):
    data.fill()

    found = data.read(seed=seed, shuffle=shuffle)

    assert_same(found, data.plain(seed=seed, shuffle=shuffle))
    assert found.cached == [data.num_rows]


@EVERY_KIND
def test_later_epochs_of_a_run_read_the_cache(data):
    found = Delivered(data.open(data.cache, epochs=3, buffer_size=8), 3, settle=True)

    assert_same(found, data.plain(3))
    assert sum(found.cached) > 1.5 * data.num_rows, "what is read ahead of an epoch is not stored yet"
    if data.kind == "blocks":
        assert found.cached[0] <= 16, "what is read ahead of the second epoch"


@BLOCKS_AND_ROWS
def test_files_may_be_added_and_come_in_another_order(data, tmp_path):
    data.fill()
    both = [str(write_rows(tmp_path / "other.jsonl", 70)), str(data.path)]

    found = data.fill(path=both)

    assert_same(found, data.plain(path=both))
    assert found.cached == [data.num_rows]
    assert data.read(path=both).cached == [data.num_rows + 70]


@EVERY_KIND
def test_files_that_were_only_touched_are_read_from_the_cache(data):
    expected = data.fill()
    for name in data.path if isinstance(data.path, list) else [data.path]:
        os.utime(name, (1, 1))

    found = data.read()

    assert_same(found, expected)
    most = data.num_rows - 60 if data.kind == "blocks" else data.num_rows - 1  # blocks wholly in the slot
    assert most < found.cached[0] <= data.num_rows


@thorough
@pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if not kind.is_stream])
@pytest.mark.parametrize("shuffle", [Shuffle(block_bytes=4096, window_blocks=4), "full"], ids=["blocks", "rows"])
def test_every_kind_of_source_is_cached(tmp_path, kind, shuffle):
    for package in KINDS[kind].needs:
        pytest.importorskip(package)
    source = KINDS[kind].write(tmp_path, make_rows(200))
    data = Data("blocks", source, tmp_path / "cache")
    expected = data.plain(shuffle=shuffle)

    first, second = data.fill(shuffle=shuffle), data.read(shuffle=shuffle)

    assert [first.samples, second.samples] == [expected.samples] * 2
    assert (first.cached, second.cached) == ([0], [200])


@thorough
def test_a_window_of_very_many_rows_is_stored_by_requests_that_a_socket_takes_whole(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"id": {i}}}\n' for i in range(60_000)))
    knobs = {"tokenize_fn": cached.row_id, "num_workers": 1, "shuffle": True, "batch_size": 10_000}

    for num_cached in (0, 60_000):
        with loader(path, tmp_path / "cache", **knobs) as data:
            found = sum(len(batch) for batch in data)
            cached.wait_until_stored(data)
            assert (found, data.statistics().cached_rows_total) == (60_000, num_cached)
            assert data.statistics().worker_restarts_total == 0


# Where samples lie


@thorough
@pytest.mark.parametrize(("num_workers", "buffer_size"), each_value([0, 2], [8, 5000]))
def test_samples_that_are_kept_stay_what_they_are_when_their_slots_are_used_again(data, num_workers, buffer_size):
    expected = data.plain(3)
    data.fill()

    with data.open(data.cache, epochs=3, num_workers=num_workers, buffer_size=buffer_size) as opened:
        kept = [sample for _ in range(3) for batch in opened for sample in batch]
        while_open = [facts(sample) for sample in kept[::7]]
        num_cached = opened.statistics().cached_rows_total

    assert while_open == expected.samples[::7]
    assert [facts(sample) for sample in kept] == expected.samples
    assert num_cached == 3 * data.num_rows


@thorough
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_forked_child_has_stays_what_it_is_when_the_slots_are_used_again(data, num_workers):
    expected = data.plain(4).samples
    data.fill()
    with data.open(data.cache, epochs=4, num_workers=num_workers, buffer_size=8) as opened:
        held = opened.get_next_batch(100)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # its end: the parent is through
            os._exit([facts(sample) for sample in held] != expected[:100])

        rest = [facts(sample) for sample in opened.get_next_batch(len(expected) - 100)]
    os.close(reading)
    os.close(writing)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rest == expected[100:]


# When it must not be read


@of("blocks", "gzip")
def test_data_of_other_content_is_tokenized(data):
    data.fill()
    rows = [*[b'{"id": %d, "pad": ""}\n' % i for i in range(50)], b'{"id": 9999, "pad": ""}\n']
    if data.kind == "blocks":
        data.path.write_bytes(b"".join(rows))
    else:
        cached.compressed(data.path, rows)

    found = data.fill()

    assert_same(found, data.plain())
    assert found.cached == [0]


@thorough
@pytest.mark.parametrize(
    ("shuffle", "most"), [(Shuffle(block_bytes=4096, window_blocks=8), 500), ("full", 1)], ids=["blocks", "rows"]
)
def test_a_change_that_no_sample_of_the_file_shows_is_seen_in_the_block_or_the_row(tmp_path, shuffle, most):
    data = Data("blocks", write_rows(tmp_path / "large.jsonl", 6000), tmp_path / "cache")
    data.fill(shuffle=shuffle)
    content = bytearray(data.path.read_bytes())
    place = content.index(b'"id": 1', 75_000) + 6  # between the places that the fingerprint reads
    content[place : place + 1] = b"9"
    with open(data.path, "r+b") as file:
        file.write(content)

    found = data.read(shuffle=shuffle)

    assert_same(found, data.plain(shuffle=shuffle))
    assert 0 < 6000 - found.cached[0] <= most, "only what was changed is tokenized again"


@pytest.mark.parametrize(
    "other",
    [
        {"tokenize_fn": cached.row_id},
        {"path": lambda path: JsonlSource(str(path), max_row_bytes=10_000)},
        {"shuffle": Shuffle(block_bytes=2048, window_blocks=4)},
    ],
    ids=["another function", "another limit", "other blocks"],
)
def test_what_samples_and_blocks_follow_from_is_part_of_the_key(data, other):
    data.fill()
    knobs = other | ({"path": other["path"](data.path)} if "path" in other else {})

    found = data.read(**knobs)

    assert_same(found, data.plain(**knobs))
    assert found.cached == [0]


def test_another_version_of_the_function_is_tokenized_and_one_without_a_version_is_not_cached(data, monkeypatch):
    data.fill()
    monkeypatch.setattr(cached.everything, "version", 2)
    assert data.fill().cached == [0]
    shutil.rmtree(data.cache)

    monkeypatch.delattr(cached.everything, "version")
    with structlog.testing.capture_logs() as events:
        found = data.read()

    assert_same(found, data.plain())
    assert not data.cache.exists()
    (event,) = [event for event in events if event["event"] == "token_cache.off"]
    assert "version" in event["reason"]


@thorough
def test_other_settings_tokenizers_and_templates_are_tokenized(tmp_path, small_tokenizer):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": f"what is {i} times {i}?"}) + "\n" for i in range(60)))
    data = Data("blocks", path, tmp_path / "cache")
    edited, other = tmp_path / "edited", tmp_path / "other"
    for folder in (edited, other):
        shutil.copytree(small_tokenizer, folder)
    config = json.loads((edited / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0]['content'] }} and"
    (edited / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.add_tokens(["times"])
    tokenizer.save(str(other / "tokenizer.json"))
    functions = [
        PromptTokenizeFn(str(folder), apply_chat_template=chat, max_length=length)
        for folder, chat, length in itertools.product((small_tokenizer, edited, other), (False, True), (None, 50))
    ]

    for function in functions:
        found = data.fill(tokenize_fn=function)
        assert_same(found, data.plain(tokenize_fn=function))
        assert found.cached == [0] or (not function.apply_chat_template and function.tokenizer == str(edited))
    for function in functions:
        assert data.read(tokenize_fn=function).cached == [60]


# Rows that are not cached


@BLOCKS_AND_ROWS
def test_a_bad_row_is_an_error_again_with_all_that_was_said_of_it(data):
    lines = data.path.read_bytes().splitlines(keepends=True)
    lines[200] = b'{"id": 200, "pad": \n'
    data.path.write_bytes(b"".join(lines))

    def error_of(cache: Path | None) -> str:
        with pytest.raises(BadRowError) as caught:
            Delivered(data.open(cache))
        return str(caught.value)

    expected = data.plain(bad_rows="skip")
    first, second = data.fill(bad_rows="skip"), data.read(bad_rows="skip")

    assert_same(first, expected)
    assert second.samples == expected.samples
    assert 0 < data.num_rows - second.cached[0] < 40, "but for its block all is cached"
    assert error_of(data.cache) == error_of(None)


def test_blank_lines_and_blocks_without_a_row_are_counted_as_ever(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"id": i, "pad": "x" * (2000 if i % 9 == 0 else i)}) for i in range(100)]
    path.write_text("\n" + "\n\n".join(rows) + "\n \n")
    data = Data("blocks", path, tmp_path / "cache")

    data.fill()
    found = data.read()

    assert_same(found, data.plain())
    assert (found.counts[2], found.cached) == (101, [100])


# Plans

PLANS: dict[str, dict[str, Any]] = {
    "xtuner": {"packing": XTuner(max_length=600, seed=5), "shuffle": True},
    "hard": {"packing": HardPacking(max_length=600), "shuffle": "full", "plan_packs": True},
}


def packs(data: Data, cache: Path | None, plan: str, **knobs: Any) -> Any:
    """What the packs hold, the snapshot in the middle, and the rows that came from the cache."""
    knobs = {"tokenize_fn": cached.row_id_and_pad, "batch_size": 2, **PLANS[plan], **knobs}
    with loader(data.path, cache, **knobs) as opened:
        found, state = [], None
        for number, batch in enumerate(opened):
            found += [[(str(one.sample.position), one.tokens.tolist()) for one in pack] for pack in batch]
            if number == 2:
                state = settled(opened.state_dict())
        if cache is not None:
            cached.wait_until_stored(opened)
        return (found, state), opened.statistics().cached_rows_total


@thorough
@pytest.mark.parametrize(("plan", "num_workers"), [("xtuner", 0), ("hard", 2)])
def test_planned_packs_are_the_same_with_the_cache_and_nothing_is_tokenized_for_them(data, plan, num_workers):
    expected, _ = packs(data, None, plan)

    for least in (0, 0.9 * data.num_rows):  # but for rows that no pack has
        cached.CALLS.clear()
        found, num_cached = packs(data, data.cache, plan, num_workers=num_workers)
        assert found == expected
        assert num_cached >= least
    assert cached.CALLS.total() <= NUM_CANARIES


@thorough
def test_each_rank_reads_the_rows_of_its_own_packs(data):
    for _, rank in itertools.product(range(2), range(3)):
        knobs = {"batch_size": 3, "drop_last": True, "ranks": {"world_size": 3, "rank": rank}}
        expected, _ = packs(data, None, "xtuner", **knobs)
        assert packs(data, data.cache, "xtuner", **knobs)[0] == expected


# Half a cache, and a damaged one


@of_each("keep", [("blocks", 0), ("rows", 2)], [(kind, 1) for kind in STREAMS])
def test_whatever_part_of_the_cache_is_left_the_order_is_the_same(data, keep):
    expected = data.plain()
    data.fill()
    assert len(segments(data.cache)) > 2
    for number, segment in enumerate(segments(data.cache)):
        if number % 3 != keep:
            segment.unlink()

    found = data.fill()
    again = data.read()

    assert_same(found, expected)
    assert found.cached[0] < data.num_rows
    assert_same(again, expected)
    assert again.cached == [data.num_rows], "what was missing was written anew"


@of_each(
    "num_delivered, num_workers",
    [("blocks", 183, 0), ("rows", 37, 0)],
    [*itertools.product(("blocks",), (0, 1, 300), (2,)), *itertools.product(("rows", *STREAMS), (37, 250), (2,))],
)
def test_a_snapshot_in_the_middle_of_a_half_cached_epoch_resumes_exactly(data, num_delivered, num_workers):
    expected = data.plain(2).samples
    data.fill()
    for segment in segments(data.cache)[::2]:
        segment.unlink()
    states = []
    for tokens in (None, data.cache):
        with data.open(tokens, epochs=2, num_workers=num_workers) as opened:
            before = [facts(one) for one in opened.get_next_batch(num_delivered)] if num_delivered else []
            states.append(settled(opened.state_dict()))
    assert states[0] == states[1], "a snapshot knows nothing of the cache"

    with data.open(data.cache, epochs=2, num_workers=num_workers) as opened:
        opened.load_state_dict(states[1])
        after = [facts(one) for batch in itertools.chain(opened, opened) for one in batch]

    assert before + after == expected


@of_each("place", [("blocks", 99), ("rows", 63)], [("blocks", 30), ("rows", 0), *((kind, 57) for kind in STREAMS)])
def test_wherever_a_byte_of_a_segment_is_changed_the_same_is_delivered_and_it_is_written_again(data, place):
    expected = data.fill()
    damaged = segments(data.cache)[0]
    content = bytearray(damaged.read_bytes())
    content[(len(content) - 20) * place // 100] ^= 4
    damaged.write_bytes(content)

    with structlog.testing.capture_logs() as events:
        found = data.fill()

    assert_same(found, expected)
    assert [event["path"] for event in events if event["event"] == "token_cache.refused"] == [str(damaged)]
    assert not damaged.exists()
    data.fill()  # rows that were read from it before it was known to be damaged
    assert data.read().cached == [data.num_rows]


@thorough
@of("blocks", "rows")
def test_segments_that_are_cut_off_or_go_while_they_are_read_are_tokenized(data):
    expected = data.plain(3)
    data.fill()
    for segment in segments(data.cache)[:2]:
        os.truncate(segment, segment.stat().st_size // 2)
    found: list[Any] = []
    with data.open(data.cache, epochs=3, num_workers=2, buffer_size=16) as opened:
        for _ in range(3):
            for batch in opened:
                found += map(facts, batch)
                for segment in segments(data.cache)[::3]:
                    segment.unlink(missing_ok=True)

    assert found == expected.samples


@of("rows")
def test_more_segments_than_a_worker_keeps_the_entries_of_are_read(data, monkeypatch):
    from asyncdata.prefetch.token_cache.segment import row_segment

    expected = data.fill()
    monkeypatch.setattr(row_segment, "_MAX_TABLES", 1)

    found = data.read()

    assert_same(found, expected)
    assert found.cached == [data.num_rows]


# Room, and other runs


@of("blocks", "rows")
def test_a_run_without_room_writes_as_much_as_fits_and_continues(data):
    expected = data.plain(2)
    with structlog.testing.capture_logs() as events:
        found = Delivered(data.open(data.cache, epochs=2, max_tokens_bytes=40_000), 2, settle=True)

    assert found.samples == expected.samples
    assert 10_000 < sum(file.stat().st_size for file in segments(data.cache)) <= 40_000
    assert [event["event"] for event in events].count("token_cache.full") == 1
    assert 0 < data.read().cached[0] < data.num_rows


@BLOCKS_AND_ROWS
def test_two_runs_share_a_cache_and_one_of_them_writes(data):
    expected = data.plain(3).samples
    num_first = len(data.plain().samples)
    with data.open(data.cache, epochs=2) as writer, data.open(data.cache, epochs=3, buffer_size=8) as reader:
        for opened in (reader, writer):
            assert [facts(one) for batch in opened for one in batch] == expected[:num_first]
        cached.wait_until_stored(writer)
        assert [facts(one) for batch in itertools.chain(reader, reader) for one in batch] == expected[num_first:]
        num_cached = reader.statistics().cached_rows_total

    assert num_cached > data.num_rows / 2, "the last epoch at the latest takes up what the other run wrote"


def test_who_comes_second_writes_when_the_first_is_gone(data):
    with data.open(data.cache, buffer_size=1) as first:
        first.get_next_batch(1)
        assert data.read().cached[0] < 60

    assert data.fill().cached[0] < 60, "the second one has written nothing"
    assert data.read().cached == [data.num_rows]
