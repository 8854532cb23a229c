"""A row is read as Python's JSON reads it, or is bad; media are bad rows or left out; spans, the plainest way."""

import json
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from asyncdata import ChatTokenizeFn, Position, PromptTokenizeFn
from asyncdata.core.messages import encode
from asyncdata.tokenization.rows import excerpt
from tests.support import parts
from tests.support.examples import in_ci
from tests.support.function_kinds import KINDS, chat_prompt
from tests.support.tokenizers import CHAT
from tests.unit.tokenization import Nowhere, drops, faults, notes, run, token_ids, values
from tests.unit.tokenization.functions.test_chat import SEES, WRITES_ALL
from tests.unit.tokenization.trained import assistant, user

LENIENT_ROWS = [
    b'{"input": NaN}', b'{"input": [Infinity, -Infinity]}', b'{"input": 1e400}', b'{"input": "\\ud800"}',
    b'{"input": "\\udc00\\ud800 x"}', b'{"input": {"\\ud800": 1}}', b'\xef\xbb\xbf{"input": 1}',
    b'{"input": 123456789012345678901234567890}', b'{"input": -0.0}',
]  # fmt: skip

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mutated_rows(draw: st.DrawFn) -> bytes:
    """A row with bytes cut out and put in where they do harm."""
    row = draw(st.dictionaries(st.sampled_from(["input", "label", "in\u00e9", "x"]), json_values, max_size=4))
    data = bytearray(json.dumps(row, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(data)))
        data[start : start + draw(st.integers(0, 2))] = draw(
            st.sampled_from([b"", b'"', b"\\", b"\\u", b"\\ud8", b"{", b"]", b"}", b",", b":", b"0", b"-", b"e9", b"."])
            | st.binary(max_size=2)
        )
    return bytes(data)


def loads(raw: bytes) -> Any:
    """What slime's reader makes of a row."""
    return json.loads(raw.decode("utf-8").removeprefix("\ufeff"))


def same(a: Any, b: Any) -> bool:
    return repr(a) == repr(b)  # so that NaN is NaN, and -0.0 is not 0


def test_bytes_that_no_loader_gives_as_a_row_are_named_too():
    """Those of every row are in the catalogue of bad inputs; a loader takes blank lines and UTF-16 out before."""
    for raw, code, reason in (
        (b"", "AD101", "the row is cut off"),
        (b'\xff\xfe{\x00"\x00', "AD106", "byte 0xff at column 1"),
        (b'{"\x00a\x00"\x00', "AD104", "raw control byte 0x00 at column 3"),
        (b'{"input": ' + b"9" * 5000 + b"}", "AD117", "more than 4300 digits"),
    ):
        for read in (parts.decode_object, parts.RowDecoder(["input"])):
            with pytest.raises(parts.RowFault, match=reason) as caught:
                read(memoryview(raw))
            assert (caught.value.code, caught.value.excerpt) == (code, excerpt(raw))


@pytest.mark.parametrize("raw", LENIENT_ROWS, ids=range(len(LENIENT_ROWS)))
def test_every_row_that_pythons_json_accepts_is_accepted(raw):
    assert same(parts.decode_object(raw), loads(raw))
    (text,) = parts.RowDecoder(["input"])(memoryview(raw))
    assert text is not None
    assert same(parts.decode_value(text), loads(raw)["input"])


@in_ci(max_examples=50)
@given(st.binary())
@example(b'{"input": "\\ud83d\\ud83d"}')
def test_no_bytes_raise_anything_but_a_row_fault(raw):
    for read in (parts.decode_object, parts.decode_value, parts.RowDecoder(["input", "label"])):
        try:
            read(raw)
        except parts.RowFault as fault:
            encode(parts.RowError(0, fault.code, fault.reason, fault.excerpt, fault.traceback))


@in_ci(max_examples=50)
@given(mutated_rows())
def test_rows_are_accepted_and_refused_as_by_json(raw):
    try:
        expected: Any = loads(raw)
    except ValueError:
        expected = None

    keys = ["input", "label", "in\u00e9"]
    if not isinstance(expected, dict):
        for read in (parts.decode_object, parts.RowDecoder(keys)):
            with pytest.raises(parts.RowFault):
                read(raw)
        return

    assert same(parts.decode_object(raw), expected)
    texts = zip(keys, parts.RowDecoder(keys)(raw), strict=True)
    found = {key: parts.decode_value(text) for key, text in texts if text is not None}
    assert same(found, {key: expected[key] for key in keys if key in expected})


@pytest.mark.parametrize(
    "keys",
    [["input", "input"], ["label", "input", "label"], ['in"put', "input"], ["a\\b", "input"], ["label", "nothing"]],
)
def test_only_the_keys_asked_for_are_taken_and_stay_as_they_are(keys):
    texts = {"input": b'"caf\xc3\xa9"', "label": b"[1, 2.50]", 'in"put': b"3", "a\\b": b"4"}
    row = b"{%s}" % b", ".join(json.dumps(key).encode() + b": " + text for key, text in texts.items())

    found = parts.RowDecoder(keys)(memoryview(row))

    assert [text and parts.decode_value(text) for text in found] == [json.loads(texts.get(key, "null")) for key in keys]
    if "label" in keys:  # without an escape in a key, the bytes are the row's own
        assert [text and bytes(text) for text in found] == [texts.get(key) for key in keys]


def test_the_last_of_two_equal_keys_counts_and_a_value_of_another_key_is_checked_but_not_decoded():
    raw = b'{"input": 1, "in\\u0070ut": 2}'

    assert parts.decode_object(raw) == {"input": 2}
    assert [bytes(text or b"") for text in parts.RowDecoder(["input"])(raw)] == [b"2"]
    assert parts.RowDecoder(["x"])(b'{"other": ' + b"9" * 5000 + b"}") == (None,)
    with pytest.raises(parts.RowFault, match="AD106|not UTF-8"):
        parts.RowDecoder(["x"])(b'{"other": "\xff"}')


@pytest.mark.parametrize(
    ("opening", "closing", "levels"),
    [(b"[", b"]", 1), (b'{"[{": ', b"}", 1), (b'[{"\\"[\\\\": ', b"}]", 2)],
    ids=["arrays", "objects", "both"],
)
def test_the_nesting_limit_does_not_depend_on_the_python_version(opening, closing, levels):
    depth = (parts.MAX_NESTING - 1) // levels

    def row(count: int) -> bytes:
        return b'{"input": ' + opening * count + b"1" + closing * count + b"}"

    assert "input" in parts.decode_object(row(depth))
    assert parts.RowDecoder(["other"])(row(depth)) == (None,)
    for read in (parts.decode_object, parts.RowDecoder(["other"])):
        with pytest.raises(parts.RowFault, match="nested deeper than 512"):
            read(memoryview(row(depth + 1)))

    in_strings = json.dumps({"input": '[{"' * 2000, "label": ['\\"[', "\\"] * 600}).encode()
    assert parts.decode_object(in_strings) == json.loads(in_strings)
    assert parts.RowDecoder(["label"])(in_strings)[0] is not None


def test_a_missing_key_lists_the_keys_of_the_row_and_suggests_one():
    def reason(row: dict[str, Any], key: str, setting: str) -> str:
        return parts.missing_key(json.dumps(row).encode(), key, setting).reason

    assert reason({"input": 1, "label": 2}, "prompt", "prompt_key") == (
        "no key 'prompt': the row has 'input', 'label': set prompt_key='input'?"
    )
    assert reason({"a": 1, "labels": 2}, "label", "label_key").endswith("set label_key='labels'?")
    assert reason({"a": 1, "\ud800": 2}, "label", "label_key").endswith(
        "the row has 'a', '\\ud800'; set label_key to the right one"
    )
    assert reason({}, "label", "label_key") == "no key 'label': the row is empty"
    assert reason(dict.fromkeys(map(str, range(99))), "x", "label_key").count("'") == 42


def test_an_excerpt_is_one_short_line_and_a_fault_can_always_be_sent():
    fault = parts.RowFault("AD421", "it said \ud800", b'{"a": "\xff\n\xe2\x82"', "Traceback:\n\udfff")

    encode(parts.RowError(0, fault.code, fault.reason, fault.excerpt, fault.traceback))
    assert (fault.reason, fault.excerpt) == ("it said \\ud800", '{"a": "\\\\xff\\n\\\\xe2\\\\x82"')
    assert (excerpt(b"a" * 80), excerpt(memoryview(b"a" * 81))) == ("a" * 80, "a" * 80 + "...")
    assert excerpt("é\n".encode() * 100) == "\\xe9\\n" * 40 + "..."
    assert excerpt("\U0001f600".encode() * 80) == "\\U0001f600" * 80


COLUMNS = ("prompt", "label", "metadata", "extra")
kept = st.tuples(
    st.lists(st.integers(0, 2**31 - 1), max_size=5), st.dictionaries(st.sampled_from(COLUMNS), json_values, max_size=4)
)
Fate = tuple[list[int], dict[str, Any]] | str
fates = st.lists(kept | st.sampled_from(["short", "dull", "", "AD101", "AD421"]), max_size=12)
"""Rows are kept, with tokens and columns; dropped, with a reason; or bad, with a code."""


def written(rows: list[Fate], cut: int = 0) -> parts.ColumnWriter:
    """In two pieces, as a worker does after a batch that raised."""
    out = parts.ColumnWriter()
    for piece in (range(min(cut, len(rows))), range(min(cut, len(rows)), len(rows))):
        part = parts.ColumnWriter(numbers=range(piece.start, len(rows))) if cut else out
        for number, row in enumerate(piece):
            place, fate = (number if cut else row), rows[row]
            if not isinstance(fate, str):
                part.keep(place, fate[0], **{name: json.dumps(value).encode() for name, value in fate[1].items()})
                part.note(place, f"{len(fate[1])} columns")
            elif fate.startswith("AD"):
                part.fail(place, parts.RowFault(fate, "why"))
            else:
                part.drop(place, fate)
        if cut:
            out.extend(part)
    return out


@in_ci(max_examples=20)
@given(rows=fates, cut=st.integers(1, 12))
def test_every_row_is_a_sample_or_a_drop_or_bad_and_is_read_as_it_was_written(rows, cut):
    reply = written(rows).finish(len(rows), 0.0)
    chunk = parts.Chunk(parts.decode_reply(encode(reply)), Position(1, 2, 10), len(rows), Nowhere(), ends_epoch=False)
    kept = [(row, *fate) for row, fate in enumerate(rows) if not isinstance(fate, str)]

    assert (written(rows, cut).finish(len(rows), 0.0), chunk.num_samples) == (reply, len(kept))
    for number, (row, tokens, columns) in enumerate(kept):
        sample = parts.SampleRange(chunk, number, number + 1, 0, 0, 1).samples()[0]
        assert sample.tokens.tolist() == tokens
        assert same([chunk.value(name, number) for name in COLUMNS], [columns.get(name) for name in COLUMNS])
        assert (sample.position, sample.source) == (Position(1, 2, 10 + row), Nowhere().location(10 + row))
    named = {row: fate for row, fate in enumerate(rows) if isinstance(fate, str)}
    dropped = {row: drop.reason for drop in chunk.drops for row in drop.rows.tolist()}
    assert dropped | dict(faults(chunk)) == named
    assert [row for row, _ in faults(chunk)] == [row for row, fate in named.items() if fate.startswith("AD")]
    for row in range(len(rows) + 1):
        before = sum(number < row for number, *_ in kept)
        assert chunk.samples_before(row) == before
        assert chunk.num_tokens(0, before) == sum(len(tokens) for _, tokens, _ in kept[:before])
        assert chunk.num_tokens(before, len(kept)) == sum(len(tokens) for _, tokens, _ in kept[before:])


@st.composite
def tilings(draw: st.DrawFn) -> list[parts.Span]:
    """Offsets as tokenizers give them: rising, some of no characters, some sharing theirs, with gaps."""
    offsets: list[parts.Span] = []
    at = 0
    for kind, length in draw(st.lists(st.tuples(st.sampled_from("tttegs"), st.integers(1, 3)), max_size=20)):
        if kind == "g":
            at += length  # characters that a normalizer removed
        elif kind == "e":
            offsets.append((at, at))
        elif kind == "s":
            offsets += [(at, at + 1)] * length
            at += 1
        else:
            offsets.append((at, at + length))
            at += length
    return offsets


@st.composite
def span_lists(draw: st.DrawFn, most: int = 40) -> list[parts.Span]:
    borders = sorted(draw(st.lists(st.integers(0, most), max_size=12)))
    return list(zip(borders[::2], borders[1::2], strict=False))


def covered(spans: list[parts.Span], length: int) -> list[bool]:
    return [any(start <= place < stop for start, stop in spans) for place in range(length)]


def is_in(token: parts.Span, block: parts.Span) -> bool:
    start, stop = token
    if start == stop:
        return block[0] <= start < block[1]

    return all(block[0] <= place < block[1] for place in range(start, stop))


def begins(token: parts.Span, block: parts.Span, text: str) -> bool:
    """Whether the token holds the block's first character, white space in front of it, and nothing else."""
    return token[0] < block[0] < token[1] <= block[1] and text[token[0] : block[0]].isspace()


@in_ci(max_examples=50)
@example(offsets=[(0, 1), (1, 2), (2, 5), (5, 6), (6, 9)], blocks=[(3, 7)], text="a" * 64)
@given(offsets=tilings(), blocks=span_lists(), text=st.text("ab ", min_size=64, max_size=64))
def test_tokens_of_a_block_are_trained_or_named(offsets, blocks, text):
    """Those of which all characters are in one block; and the first one also with the white space before it."""
    within = parts.token_spans(parts.Offsets.of(offsets), blocks)
    spans, straddling = parts.trained_tokens(parts.Offsets.of(offsets), blocks, text)

    trained = [any(is_in(token, block) or begins(token, block, text) for block in blocks) for token in offsets]
    touched = [any(max(token[0], block[0]) < min(token[1], block[1]) for block in blocks) for token in offsets]
    assert covered(within, len(offsets)) == [any(is_in(token, block) for block in blocks) for token in offsets]
    assert all(start < stop for start, stop in within)
    assert all(one[1] < other[0] for one, other in pairwise(within))
    assert covered(spans, len(offsets)) == trained
    assert straddling == [place for place in range(len(offsets)) if touched[place] and not trained[place]]


SINGLE = parts.Offsets.of([(place, place + 1) for place in range(12)])
SHARED = parts.Offsets.of([(0, 1), (1, 2), (1, 2), (1, 2), (2, 3), (3, 4)])


@pytest.mark.parametrize(
    ("offsets", "context", "num_tokens", "cut", "removed"),
    [
        (SINGLE, (2, 8), 3, "truncate_context_left", (2, 5)), (SINGLE, (2, 8), 3, "truncate_context_right", (5, 8)),
        (SINGLE, (2, 8), 3, "truncate_context_middle", (4, 7)), (SHARED, (0, 6), 2, "truncate_context_left", (0, 4)),
        (SHARED, (0, 6), 3, "truncate_context_right", (1, 6)), (SHARED, (0, 6), 2, "truncate_context_middle", (1, 4)),
    ],
)  # fmt: skip
def test_a_context_is_cut_where_it_should_be_and_no_character_in_two(offsets, context, num_tokens, cut, removed):
    assert parts.place_cut(offsets, context, num_tokens, cut) == removed


TEXT = {"type": "text", "text": "What is it?"}


MEDIA = [
    *({"type": kind} for kind in ("image", "video", "audio")),
    {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}},
    {"type": "input_image", "image_url": "a.png"},
    {"type": "video_url", "video_url": {"url": "a.mp4"}},
    {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "wav"}},
    {"image": "a.png"},
]


def chat_with(part: Any) -> list[dict[str, Any]]:
    return [user([part, TEXT]), assistant("A cat.")]


@pytest.mark.parametrize("template", [SEES, WRITES_ALL], ids=["sees", "writes all"])
def test_a_content_part_that_is_a_medium_makes_a_bad_row(name, template):
    named = [user("<|image_pad|>"), assistant("a")]  # which is text
    chats = [CHAT, named, *[CHAT] * 40, *(chat_with(part) for part in MEDIA)]
    bad = [(number, "AD130") for number in range(42, len(chats))]
    tokenizer = ChatTokenizeFn(name, chat_template=template).open()

    found = run(tokenizer, [{"messages": chat} for chat in chats])
    asked = run(chat_prompt(name, chat_template=template).open(), [{"input": chat[:2]} for chat in chats])

    assert faults(found) == faults(asked) == bad
    assert [faults(run(tokenizer, [{"messages": chat}])) for chat in chats[42:]] == [[(0, "AD130")]] * len(MEDIA)
    assert "'messages'[0] has '" in found.errors[0].reason
    assert "media='leave_out'" in found.errors[0].reason


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_key_of_a_row_with_media_makes_a_bad_row_and_an_empty_one_does_no_harm(name, kind):
    full = [{key: ["a.png"]} for key in parts.MEDIA_KEYS] + [{"image": {"bytes": "aGk=", "path": None}}]
    empty = [None, "", [], {}, False, True, 0, [None], [[]], {"bytes": None, "path": None}]
    rows = [{**kind.row, "images": each, "audio": each} for each in empty]

    chunk = run(kind.make(name).open(), [*rows, *({**kind.row, **each} for each in full)])

    assert faults(chunk) == [(len(rows) + number, "AD130") for number in range(len(full))]
    assert f"the row has '{parts.MEDIA_KEYS[0]}'" in chunk.errors[0].reason
    assert (chunk.num_samples, notes(chunk)) == (len(rows), {})


def test_a_key_that_a_setting_names_is_no_medium_and_rows_for_a_framework_keep_theirs(name):
    fn = PromptTokenizeFn(name, prompt_key="video", label_key="audio", metadata_key="image")
    rows = parts.PromptRowFn(name, prompt_key="prompt", apply_chat_template=True, chat_template=SEES, max_length=64)
    row = {"prompt": chat_with({"type": "image"})[:1], "images": ["a.png"]}

    chunk = run(fn.open(), [{"video": "a prompt", "audio": [1], "image": {"docker": "a"}}])
    kept = run(rows.open(), [row])

    assert (values(chunk, "label"), values(chunk, "metadata"), chunk.errors) == ([[1]], [{"docker": "a"}], [])
    assert (values(kept, "extra"), kept.errors) == ([row], [])


def test_media_that_are_left_out_leave_the_text_and_are_counted(name):
    fn = ChatTokenizeFn(name, chat_template=WRITES_ALL, media="leave_out", metadata_key="id")
    rows = [{"messages": chat_with(part), "images": ["a.png"], "id": {"n": 1}} for part in MEDIA]
    plain = {"messages": [user("What is it?"), assistant("A cat.")]}
    beside = {"messages": [{**user("What is it?"), "images": ["a.png"]}, assistant("A cat.")]}

    chunk = run(fn.open(), [plain, *rows, beside])

    assert (chunk.errors, notes(chunk)) == ([], {"media_left_out": [*range(1, len(rows) + 2)]})
    assert values(chunk, "metadata") == [None, *[{"n": 1}] * len(rows), None]
    assert token_ids(chunk) == [token_ids(chunk)[0]] * (len(rows) + 2)
    assert values(chunk, "spans") == [values(chunk, "spans")[0]] * (len(rows) + 2)
    assert faults(run(ChatTokenizeFn(name).open(), [beside])) == [(0, "AD130")]

    nothing_else = {"messages": [user("Draw."), assistant([{"type": "image"}])]}
    assert faults(run(fn.open(), [nothing_else])) == [(0, "AD132")], "it is no empty answer"
    short = run(ChatTokenizeFn(name, media="leave_out", max_length=3).open(), [{"messages": CHAT, "images": ["a.png"]}])
    assert (drops(short), notes(short)) == ({"max_length": [0]}, {}), "a row that is dropped has no note"


@pytest.mark.parametrize(
    ("content", "left"),
    [
        ([{"type": "image"}, TEXT], "What is it?"), ([{"type": "image"}, "words", TEXT], "wordsWhat is it?"),
        ([{"type": "image"}], ""), ({"type": "image_url", "image_url": "a"}, ""),
        ([{"text": "words", "image": "a"}], "words"),
        ([{"type": "image"}, {"type": "thinking", "thinking": "a"}], [{"type": "thinking", "thinking": "a"}]),
        ([TEXT], [TEXT]), ("<|image_pad|> <image>", "<|image_pad|> <image>"), (None, None),
    ],
)  # fmt: skip
def test_what_is_left_of_a_content(content, left):
    for chat in ([user(content)], json.dumps([user(content)])):
        row = json.dumps({"m": chat, "images": ["a"], "image": {"a": 1}, "n": [1, "[{bad"]}).encode()

        bare = json.loads(parts.without_media(row, ["images"]))
        assert bare == {"m": [user(left)], "image": {"a": 1}, "n": [1, "[{bad"]}
