"""The token cache changes the time and nothing else: whatever is in it, missing from it, or wrong with it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import stat
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from tokenizers import Tokenizer

from asyncdata import BadRowError, Cache, ConfigError, DataLoader, JsonlSource, PromptTokenizeFn, Shuffle
from asyncdata.core.messages import Tokenize
from asyncdata.workers.inline import InlineExecutor
from tests.support import cached
from tests.support.cached import Delivered, assert_same, loader, segments, write_lines
from tests.support.combinations import each_value
from tests.support.loading import write_rows
from tests.support.ranks import settled

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("pyarrow")
pytest.importorskip("xxhash")

from asyncdata.prefetch.token_cache.worker import CacheWorker

pytestmark = pytest.mark.thorough

NUM_ROWS = 400


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_lines(tmp_path, NUM_ROWS)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is tokenized from now on in this process is an error. Its fingerprint is the same."""

    def refuse(row: cached.Row) -> list[int]:
        raise AssertionError(f"row {row['id']} was tokenized")

    for name in ("__module__", "__qualname__", "version"):
        setattr(refuse, name, getattr(cached.everything, name))
    monkeypatch.setattr(cached, "everything", refuse)


def plain(path: Any, **knobs: Any) -> Delivered:
    return Delivered(loader(path, None, **knobs), knobs.get("epochs", 1))


def fill(path: Any, cache: Path, **knobs: Any) -> Delivered:
    return Delivered(loader(path, cache, **knobs), settle=True)


def test_a_row_in_the_cache_is_not_tokenized(path, cache, request):
    expected = plain(path)
    fill(path, cache)
    request.getfixturevalue("refusing")

    assert_same(Delivered(loader(path, cache, tokenize_fn=cached.everything)), expected)


def test_a_window_of_very_many_rows_is_stored_by_requests_that_a_socket_takes_whole(tmp_path, cache):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"id": {i}}}\n' for i in range(60_000)))
    knobs = {"tokenize_fn": cached.row_id, "num_workers": 1, "shuffle": True, "batch_size": 10_000}

    for num_cached in (0, 60_000):
        with loader(path, cache, **knobs) as data:
            found = sum(len(batch) for batch in data)
            cached.wait_until_stored(data)
            assert (found, data.statistics().cached_rows_total) == (60_000, num_cached)
            assert data.statistics().worker_restarts_total == 0


# Where samples lie


@pytest.mark.parametrize("buffer_size", [8, 5000])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_that_are_kept_stay_what_they_are_when_their_slots_are_used_again(
    path, cache, num_workers, buffer_size
):
    expected = plain(path, epochs=3)
    fill(path, cache)

    with loader(path, cache, epochs=3, num_workers=num_workers, buffer_size=buffer_size) as data:
        kept = [sample for _ in range(3) for batch in data for sample in batch]
        while_open = [cached.facts(sample) for sample in kept[::7]]
        num_cached = data.statistics().cached_rows_total
    closed = [cached.facts(sample) for sample in kept]

    assert while_open == expected.samples[::7]
    assert closed == expected.samples
    assert num_cached == 3 * NUM_ROWS


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_forked_child_has_stays_what_it_is_when_the_slots_are_used_again(path, cache, num_workers):
    expected = plain(path, epochs=4).samples
    fill(path, cache)
    with loader(path, cache, epochs=4, num_workers=num_workers, buffer_size=8) as data:
        held = data.get_next_batch(100)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(writing)
            os.read(reading, 1)  # its end: the parent is through
            os._exit([cached.facts(sample) for sample in held] != expected[:100])

        left = len(expected) - 100
        rest = [cached.facts(sample) for sample in data.get_next_batch(left)]
    os.close(reading)
    os.close(writing)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rest == expected[100:]


def test_workers_are_asked_for_nothing_but_scans_of_what_is_cached(path, cache, monkeypatch):
    expected, seen = fill(path, cache), list[Any]()
    real = InlineExecutor.submit

    def submit(executor: InlineExecutor, request: Any, *more: Any) -> None:
        seen.append(request)
        real(executor, request, *more)

    monkeypatch.setattr(InlineExecutor, "submit", submit)
    with loader(path, cache) as data:
        num_samples = sum(len(batch) for batch in data)
        canaries = data.state_dict()["canaries"]

    assert num_samples == len(expected.samples)
    tokenized = [request for request in seen if isinstance(request, Tokenize)]
    assert [len(request.starts) // 4 for request in tokenized] == [len(canaries)], (
        "the canaries, which are never cached"
    )


def test_a_cached_window_is_read_by_few_requests_however_many_blocks_it_has(tmp_path, cache, monkeypatch):
    path, seen = write_rows(tmp_path / "rows.jsonl", 6000), list[Any]()
    knobs = {"shuffle": Shuffle(block_bytes=1024, window_blocks=1024), "batch_size": 1000}
    fill(path, cache, **knobs)
    fill(path, cache, **knobs)  # what was read ahead while the first was stored
    real = CacheWorker.scan
    monkeypatch.setattr(CacheWorker, "scan", lambda worker, request: (seen.append(request), real(worker, request))[1])

    found = Delivered(loader(path, cache, **knobs))

    assert found.cached == [6000]
    assert sum(len(request.blocks) for request in seen) > 300
    assert len(seen) == 4


# When it must not be read


def test_a_file_of_other_content_is_tokenized(path, cache):
    fill(path, cache)
    path.write_bytes(path.read_bytes().replace(b'"id": 399', b'"id": 777'))

    found = Delivered(loader(path, cache), settle=True)

    assert_same(found, plain(path))
    assert found.cached == [0]


def test_a_change_that_no_sample_of_the_file_shows_is_seen_in_the_block(tmp_path, cache):
    path = write_rows(tmp_path / "large.jsonl", 6000)
    shuffle = Shuffle(block_bytes=4096, window_blocks=8)
    fill(path, cache, shuffle=shuffle)
    data = bytearray(path.read_bytes())
    place = data.index(b'"id": 1', 75_000) + 6  # between the places that the fingerprint reads
    data[place : place + 1] = b"9"
    with open(path, "r+b") as file:
        file.write(data)

    found = Delivered(loader(path, cache, shuffle=shuffle))

    assert_same(found, plain(path, shuffle=shuffle))
    assert 0 < 6000 - found.cached[0] < 500, "only the block that was changed is tokenized again"


def test_another_version_of_the_function_is_tokenized(path, cache, monkeypatch):
    fill(path, cache)
    monkeypatch.setattr(cached.everything, "version", 2)

    assert fill(path, cache).cached == [0]


def test_another_function_is_tokenized(path, cache):
    fill(path, cache)

    found = Delivered(loader(path, cache, tokenize_fn=cached.row_id))

    assert found.cached == [0]
    assert found.samples == plain(path, tokenize_fn=cached.row_id).samples


def test_other_settings_tokenizers_and_templates_are_tokenized(tmp_path, cache, small_tokenizer):
    rows = [{"input": f"what is {i} times {i}?"} for i in range(60)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    edited = tmp_path / "edited"
    shutil.copytree(small_tokenizer, edited)
    config = json.loads((edited / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0]['content'] }} and"
    (edited / "tokenizer_config.json").write_text(json.dumps(config))
    other = tmp_path / "other"
    shutil.copytree(small_tokenizer, other)
    tokenizer = Tokenizer.from_file(str(other / "tokenizer.json"))
    tokenizer.add_tokens(["times"])
    tokenizer.save(str(other / "tokenizer.json"))
    functions = [
        PromptTokenizeFn(str(folder), apply_chat_template=chat, max_length=length)
        for folder, chat, length in itertools.product((small_tokenizer, edited, other), (False, True), (None, 50))
    ]

    for function in functions:
        found = fill(path, cache, tokenize_fn=function)
        assert_same(found, plain(path, tokenize_fn=function))
        assert found.cached == [0] or (not function.apply_chat_template and function.tokenizer == str(edited))
    for function in functions:
        assert Delivered(loader(path, cache, tokenize_fn=function)).cached == [60]


def test_other_limits_are_tokenized(path, cache):
    fill(path, cache)

    assert Delivered(loader(JsonlSource(str(path), max_row_bytes=10_000), cache)).cached == [0]
    assert Delivered(loader(path, cache, shuffle=Shuffle(block_bytes=2048, window_blocks=4))).cached == [0]


def test_a_function_without_a_fingerprint_is_not_cached_and_that_is_said(path, cache, monkeypatch):
    monkeypatch.delattr(cached.everything, "version")
    with structlog.testing.capture_logs() as events:
        found = Delivered(loader(path, cache))

    assert_same(found, plain(path))
    assert not cache.exists()
    (event,) = [event for event in events if event["event"] == "token_cache.off"]
    assert "version" in event["reason"]


# Rows that are not cached


def test_a_bad_row_is_an_error_again_with_all_that_was_said_of_it(tmp_path, cache):
    path = write_rows(tmp_path / "rows.jsonl", NUM_ROWS)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[200] = b'{"id": 200, "pad": \n'
    path.write_bytes(b"".join(lines))

    def error_of(cache: Path | None) -> str:
        with pytest.raises(BadRowError) as caught:
            Delivered(loader(path, cache, shuffle=False))
        return str(caught.value)

    expected = plain(path, bad_rows="skip")
    first = fill(path, cache, bad_rows="skip")
    second = Delivered(loader(path, cache, bad_rows="skip"))

    assert_same(first, expected)
    assert_same(second, expected)
    assert 0 < NUM_ROWS - second.cached[0] < 40, "but for its block all is cached"
    assert error_of(cache) == error_of(None)


def test_blank_lines_and_blocks_without_a_row_are_counted_as_ever(tmp_path, cache):
    path = tmp_path / "rows.jsonl"
    rows = [json.dumps({"id": i, "pad": "x" * (2000 if i % 9 == 0 else i)}) for i in range(100)]
    path.write_text("\n" + "\n\n".join(rows) + "\n \n")

    expected = plain(path)
    fill(path, cache)
    found = Delivered(loader(path, cache))

    assert_same(found, expected)
    assert found.counts[2] == 101
    assert found.cached == [100]


# Half a cache


@pytest.mark.parametrize(("num_delivered", "num_workers"), each_value([0, 1, 37, 100, 183, 300], [0, 2]))
def test_a_snapshot_in_the_middle_of_a_half_cached_epoch_resumes_exactly(path, cache, num_delivered, num_workers):
    expected = plain(path, epochs=2).samples
    with loader(path, cache, epochs=2, num_workers=num_workers) as data:
        before = [cached.facts(sample) for sample in data.get_next_batch(num_delivered)] if num_delivered else []
        state = data.state_dict()
    for number, segment in enumerate(segments(cache)):
        if number % 2:
            segment.unlink()

    with loader(path, cache, epochs=2, num_workers=num_workers) as data:
        data.load_state_dict(state)
        after = [cached.facts(sample) for sample in itertools.islice(samples_of(data), len(expected))]

    assert before + after == expected


def samples_of(data: DataLoader) -> Any:
    for _ in range(2):
        for batch in data:
            yield from batch


def test_a_snapshot_knows_nothing_of_the_cache(path, cache):
    fill(path, cache)
    with loader(path, cache, buffer_size=8) as data, loader(path, None, buffer_size=8) as other:
        data.get_next_batch(300)
        other.get_next_batch(300)

        assert settled(data.state_dict()) == settled(other.state_dict())


# Sharing


def test_two_runs_share_a_cache_and_one_of_them_writes(path, cache):
    expected = plain(path)
    writer, reader = loader(path, cache, epochs=2), loader(path, cache, epochs=3, buffer_size=8)
    with writer, reader:
        batches = [list(data) for data in (reader, writer)]
        cached.wait_until_stored(writer)
        later = [batch for _ in range(2) for batch in reader]
        num_cached = reader.statistics().cached_rows_total

    for some in batches:
        assert [cached.facts(sample) for batch in some for sample in batch] == expected.samples
    assert [cached.facts(sample) for batch in later for sample in batch] == plain(path, epochs=3).samples[
        len(expected.samples) :
    ]
    assert num_cached > NUM_ROWS / 2, "the last epoch at the latest takes up what the other run wrote"


def test_who_comes_second_writes_when_the_first_is_gone(path, cache):
    with loader(path, cache, buffer_size=1) as first:
        first.get_next_batch(1)
        second = Delivered(loader(path, cache))
        assert second.cached[0] < 60

    assert fill(path, cache).cached[0] < 60, "the second one has written nothing"
    assert Delivered(loader(path, cache)).cached == [NUM_ROWS]


def test_a_cache_is_its_owners_alone(path, cache):
    fill(path, cache)

    (folder,) = cache.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {0o600}
    assert not list(folder.glob(".run-*")), "what was written on the way is gone"


def test_a_link_in_the_place_of_a_cache_is_refused(path, cache, tmp_path):
    fill(path, cache)
    (folder,) = cache.iterdir()
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(ConfigError, match="AD611"):
        loader(path, cache)


def test_a_segment_that_is_a_link_is_not_read(path, cache, tmp_path):
    fill(path, cache)
    for number, segment in enumerate(segments(cache)):
        segment.rename(tmp_path / f"{number}.arrow")
        segment.symlink_to(tmp_path / f"{number}.arrow")

    found = Delivered(loader(path, cache))

    assert found.cached == [0]
    assert_same(found, plain(path))


# Where there can be none


def test_a_folder_that_cannot_be_made_is_refused_with_the_way_out(path, tmp_path):
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=r"AD612 .*set Cache"):
        loader(path, tmp_path / "file" / "cache")


@pytest.mark.parametrize("missing", ["pyarrow", "xxhash"])
def test_without_its_packages_the_error_names_the_extra(path, cache, monkeypatch, missing):
    from asyncdata.loader import open_token_cache

    real = open_token_cache.importlib.util.find_spec
    monkeypatch.setattr(
        open_token_cache.importlib.util, "find_spec", lambda name: None if name == missing else real(name)
    )

    with pytest.raises(ConfigError, match=rf"Cache\(tokens=\.\.\.\) needs {missing}: pip install {missing}"):
        loader(path, cache)


def test_true_means_the_folder_beside_the_row_index(path, tmp_path):
    beside = Cache(folder=str(tmp_path / "here"), tokens=True)
    Delivered(loader(path, True, cache=beside), settle=True)
    assert segments(tmp_path / "here" / "tokens")

    fill(path, True)
    assert segments(tmp_path / "cache" / "asyncdata" / "tokens")
