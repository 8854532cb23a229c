"""Settings: what is said of names and values that no class takes; messages are bounded, and whole on the other side."""

import copy
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import asyncdata as ad
from asyncdata import JsonlSource, Shuffle
from asyncdata.core.identity import digest, joined
from asyncdata.core.messages import encode, pieces
from asyncdata.errors import ConfigError
from tests.support import parts
from tests.support.faults import Program

OF_SAMPLES = {"Document", "OutcomeTable", "Position", "Sample", "SourceLocation", "SourceStatistics", "Statistics"}
"""What the library makes, many times, and no user does."""


def test_a_name_that_there_is_not_is_refused_with_the_class_and_all_that_it_takes():
    """Of each class that users make, but for loaders and errors."""
    found = [getattr(ad, name) for name in ad.__all__ if name not in OF_SAMPLES]
    classes = [one for one in found if isinstance(one, type) and inspect.signature(one).parameters]
    others = (BaseException, str, ad.DataLoader, ad.AsyncDataLoader, ad.TokenizeFn)
    for kind in (one for one in classes if not issubclass(one, others)):
        known = ", ".join(sorted(inspect.signature(kind).parameters))

        with pytest.raises(ConfigError) as refused:
            kind(zzz=1)

        assert str(refused.value) == f"there is no setting 'zzz' of {kind.__name__}; there are {known}"
    assert not any(issubclass(getattr(ad, name), parts.Settings) for name in OF_SAMPLES), "a call more for each"


def test_an_error_of_a_class_itself_is_not_taken_for_one_of_a_name():
    class Struct(parts.Settings, frozen=True):
        def __post_init__(self) -> None:
            raise TypeError("its own")

    class Plain:
        @parts.naming_settings
        def __init__(self) -> None:
            raise TypeError("its own")

    for kind in (Struct, Plain):
        with pytest.raises(TypeError, match="^its own$"):
            kind()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: ad.Shuffle(window_block=3), "did you mean 'window_blocks'"),
        (lambda: ad.PassRate(drop_over=0.9), "did you mean 'drop_above'"),
        (lambda: ad.PackedCollator(max_len=8), "did you mean 'max_length'"),
        (lambda: ad.ChatTokenizeFn("a", max_len=8), "did you mean 'max_length'"),
        (lambda: ad.ChatTokenizeFn("a", truncation=True), "did you mean 'overlong'"),
        (lambda: ad.PackedCollator(overlong="drop"), "did you mean 'truncate_packs'"),
        (lambda: ad.RayExecutor(num_worker=2), "did you mean 'num_workers'"),
        (lambda: ad.Mix({"a": "a"}, temprature=2), "did you mean 'temperature'"),
        (lambda: ad.Shuffle(64), "Shuffle takes its settings each by its name, as in name=value; they are enabled, "),
        (lambda: ad.ChatTokenizeFn("a", "b"), r"at most 1 without a name \(tokenizer\)"),
        (lambda: ad.ChatTokenizeFn("a", tokenizer="b"), "ChatTokenizeFn was given tokenizer twice"),
        (lambda: ad.Mix({"a": "a"}, 3), r"Mix takes its settings at most 1 without a name \(parts\)"),
        (lambda: ad.BadRows(policy="drop"), r"^BadRows: policy='drop': it must be 'raise', 'skip' or 'quarantine'$"),
        (lambda: ad.RowShuffle(part="test"), r"^RowShuffle: part='test': it must be 'train', 'eval' or None$"),
    ],
)
def test_a_wrong_setting_is_refused_with_the_right_one(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_settings_that_are_missing_are_a_type_error_that_names_them():
    with pytest.raises(TypeError, match=r"^SoftPacking needs max_length; its settings are max_length, window_samples"):
        ad.SoftPacking()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^Part needs source; "):
        ad.Part()  # type: ignore[call-arg]


def test_it_is_copied_pickled_replaced_shown_and_decoded_as_any_struct():
    shuffle = Shuffle(window_blocks=3)

    assert copy.copy(shuffle) == copy.deepcopy(shuffle) == shuffle
    assert pickle.loads(pickle.dumps(shuffle)) == shuffle  # noqa: S301 - our own
    assert msgspec.structs.replace(shuffle, window_blocks=4) == Shuffle(window_blocks=4)
    assert msgspec.json.decode(msgspec.json.encode(shuffle), type=Shuffle) == shuffle
    assert repr(shuffle) == "Shuffle(enabled=True, block_bytes=32768, window_blocks=3)"
    assert list(inspect.signature(Shuffle).parameters) == ["enabled", "block_bytes", "window_blocks"]


# What a user's row or function gives may be of any size


def test_a_long_text_keeps_its_beginning_and_its_end():
    text = str(ConfigError(f"AD481 the policy raised {'x' * 9_000_000}; repair it"))

    assert len(text) < 21_000
    assert text.startswith("AD481 the policy raised xxx")
    assert text.endswith("; repair it")
    assert parts.shortened("a" * 30, 30) == "a" * 30
    assert parts.shortened("a" * 20 + "b" * 20, 30) == "a" * 20 + " ... (10 characters left out) ... " + "b" * 10
    assert parts.shortened("a\n" * 20, 30) == "a\n" * 10 + "\n... (10 characters left out) ...\n" + "a\n" * 5


@pytest.mark.parametrize(
    ("drops", "text"),
    [
        ({}, "there was no row"),
        ({"b": 1, "a": 2}, "2 by a, 1 by b"),
        ({f"reason {n}": n for n in range(1, 1012)}, "1002 by reason 1002"),
    ],
)
def test_the_most_frequent_reasons_of_drops_are_named(drops, text):
    assert parts.by_reason(drops).startswith(text)
    assert len(parts.by_reason(drops)) < 300
    assert parts.by_reason(drops).endswith("1,001 other reasons" if len(drops) > 10 else text)


AT_THE_SAME_TIME = """
import sys, threading
import msgspec
from tests.support.parts import prepared

sys.setswitchinterval(1e-6)
for number in range(60):
    inner = msgspec.defstruct(f"Inner{number}", [("a", int, 0), ("b", "dict[str, list[int]] | None", None)])
    kind = msgspec.defstruct(f"Outer{number}", [("inner", inner), ("others", list[inner])])
    start = threading.Barrier(4)

    def convert():
        start.wait()
        msgspec.convert({"inner": {"a": 1}, "others": [{"b": {"c": [2]}}]}, prepared(kind))

    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_meet_a_struct_for_the_first_time_do_not_end_the_process():
    """As loaders that are made, or restored, in threads: without ``prepared`` it is a segmentation fault."""
    with Program("-c", AT_THE_SAME_TIME) as program:
        assert program.end() == (0, "")


TOKENIZED = parts.Tokenized(
    tokens=b"1234", token_ends=b"\x01\x00\x00\x00", kept=b"",
    columns={"label": parts.Column(b'"\xc3\xbc"', b"\x04\x00\x00\x00")}, drops={"too long": b"\x02\x00\x00\x00"},
    errors=[parts.RowError(1, "AD101", "why", "excerpt", "trace"), parts.RowError(2, "AD102", "why")], busy_s=0.25,
)  # fmt: skip


def test_the_samples_of_a_reply_are_sent_from_where_they_lie():
    tokens, values = bytes(100_000), bytes(70_000)
    reply = msgspec.structs.replace(TOKENIZED, tokens=tokens, columns={"prompt_text": parts.Column(values, b"")})

    sent = pieces(1, reply)

    assert {id(tokens), id(values)} <= set(map(id, sent))
    assert sum(len(piece) for piece in sent if piece is not tokens and piece is not values) < 500


STAMPS = [
    parts.ObjectStamp(parts.Address("s3", "bucket", "data/a.jsonl"), 10, '"etag"', "v1", 7),
    parts.ObjectStamp(parts.Address("s3", "bucket", "b"), 0, "", "v2", 0),
    parts.ObjectStamp(parts.Address("http", "host:80", "a b/é?.jsonl"), 1 << 40, "", "", 1_700_000_000_000_000_000, 1),
    parts.ObjectStamp(parts.Address("s3", "other", "\udcff é.jsonl"), 3, 'W/"é"', "", 0, 2),
]


def file_of(stamp: parts.ObjectStamp) -> parts.FileRef:
    """The object for workers. In its digest, the version and the time count only where there is no etag."""
    sign = stamp.etag or stamp.version or str(stamp.mtime_ns)
    pin = parts.Pin(stamp.store, stamp.address, stamp.etag, stamp.version)
    return parts.FileRef(stamp.path, stamp.num_bytes, 0, stamp.mtime_ns, 0, digest(str(stamp.num_bytes), sign), pin)


def packed(stamps: list[parts.ObjectStamp]) -> parts.ObjectRefs:
    found = parts.ObjectsOfStore()
    for stamp in stamps:
        found.add(stamp.store, stamp.address, stamp.num_bytes, stamp.etag, stamp.version, stamp.mtime_ns)
    return found.packed()


def sent(refs: parts.ObjectRefs) -> parts.ObjectRefs:
    job = parts.Job(files=refs, tokenize=None, max_row_bytes=1, block_bytes=1, slack_bytes=0)
    found = parts.decode_job(encode(job)).files
    assert isinstance(found, parts.ObjectRefs)
    return found


WAYS = {
    "as they were packed": lambda refs: refs, "sent": sent, "taken": lambda refs: refs.taken(range(len(refs))),
    "joined": lambda refs: joined([refs.taken(range(1)), packed([]), refs.taken(range(1, len(refs)))]),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_each_object_is_what_it_is_by_itself(way):
    refs = way(packed(STAMPS))

    expected = list(map(file_of, STAMPS))
    assert list(refs) == refs[:] == [refs[number] for number in range(-4, 0)] == expected
    assert list(refs.paths) == [file.path for file in expected]
    assert list(refs.sizes) == [file.num_bytes for file in expected]
    assert ([parts.ObjectStamp.of(file) for file in refs], list(joined([]))) == (STAMPS, [])
    with pytest.raises(IndexError):
        refs[4]


@pytest.mark.parametrize("num_objects", [4, 1400])
def test_their_fingerprint_is_that_of_files(num_objects):
    stamps = [
        msgspec.structs.replace(stamp, address=stamp.address.with_key(f"{number}/{number}{stamp.address.key}"))
        for number in range(num_objects // 4)
        for stamp in STAMPS
    ]
    files = list(map(file_of, stamps))

    expected = parts.data_fingerprint(files)
    assert parts.data_fingerprint(packed(stamps)) == parts.data_fingerprint(sent(packed(stamps))) == expected


class Listed:
    """A store of rows ``{}``; ``s3://N`` has N objects."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self._number = int(url.partition("//")[2])

    def pinned(self, key: str) -> str:
        return key

    def list(self, prefix: str) -> Iterator[parts.ObjectStamp]:
        keys = (f"{one:06}.jsonl" for one in range(self._number))
        return (parts.ObjectStamp(parts.Address("s3", str(self._number), key), 3, '"e"') for key in keys)

    def read(self, found: parts.ObjectStamp, start: int, stop: int) -> bytes:
        return b"{}\n"[start:stop]

    def close(self) -> None:
        """Nothing is open."""


def test_very_many_objects_are_opened_without_a_value_for_each_and_digested_when_they_are_listed(monkeypatch):
    """A first state must not stop the trainer to digest a million objects."""
    made = []
    of_one = parts.real("object_of_many")
    parts.change(monkeypatch, object_of_many=lambda self, number: made.append(number) or of_one(self, number))

    blocks = JsonlSource("s3://3000/*.jsonl", storage_options={"store": f"{__name__}:Listed"}).open(1024)
    with monkeypatch.context() as patch:
        patch.setattr("asyncdata.core.identity.short_digest", None)
        assert blocks.fingerprint()["num_files"] == 3000
    blocks.check_unchanged()

    assert (blocks.num_blocks, blocks.blocks([2999])[0].stop) == (3000, 3)
    assert len(made) < 70  # those of which the first bytes are read
