"""The rows and texts that commands show are those that a loader delivers, and nothing in them can pass for a sign."""

import json
import re
from itertools import groupby, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import asyncdata as ad
from asyncdata.xtuner import XTunerPacking
from tests.support import sources
from tests.support.loading import row_id
from tests.support.parts import MaskedText, OrderView, Piece, TokenTexts, Turn, Turns, change, lines_of, plain_text
from tests.unit.tokenization.trained import assistant, user, variant

NUM_ROWS = 120
ROWS = [{"id": number, "pad": "é" * (number % 37)} for number in range(NUM_ROWS)]
ROW_ID = ("--tokenize-fn", "tests.support.loading:row_id")
TWO_THIRDS = ("--tokenize-fn", "tests.support.loading:every_third_dropped")


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jsonl(folder):
    """With a mark at its beginning, blank lines, carriage returns, and no end of its last line."""
    lines = [json.dumps(row).encode() + b"\r" * (row["id"] % 2) + b"\n" * (1 + (row["id"] % 9 == 0)) for row in ROWS]
    return str(sources.write(folder / "rows.jsonl", b"\xef\xbb\xbf" + b"".join(lines).rstrip()))


def gzipped(folder):
    return str(sources.write(folder / "rows.jsonl.gz", sources.members([sources.jsonl(ROWS)])))


def array(folder):
    return str(sources.write(folder / "rows.json", json.dumps(ROWS).encode()))


def parquet(folder):
    files = pytest.importorskip("tests.support.parquet_files")
    columns = {name: [row[name] for row in ROWS] for name in ("id", "pad")}
    return str(files.write(folder / "rows.parquet", group_rows=50, columns=columns))


def in_order(name, settings):
    return "--loader", f"{name}={json.dumps(settings)}"


WINDOWS: Any = (("--block-bytes", "512", "--window-blocks", "4"), ad.Shuffle(block_bytes=512, window_blocks=4))
FULL: Any = (("--shuffle", "full"), "full")
SLIMES, KEYED = {"method": "slime", "stop": 90}, {"method": "keyed", "part": "eval", "train_ratio": 0.7}
ORDERS: dict[str, Any] = {
    "lines in windows": (jsonl, *WINDOWS), "lines in one window": (jsonl, (), True), "all lines": (jsonl, *FULL),
    "lines as they lie": (jsonl, ("--no-shuffle", "--block-bytes", "700"), ad.Shuffle(enabled=False, block_bytes=700)),
    "lines longer than blocks": (jsonl, ("--block-bytes", "16"), ad.Shuffle(block_bytes=16)),
    "lines in slime's order": (jsonl, in_order("shuffle", SLIMES), ad.RowShuffle(**SLIMES)),
    "a part of the lines": (jsonl, in_order("shuffle", KEYED), ad.RowShuffle(**KEYED)),
    "a gzip in windows": (gzipped, *WINDOWS), "an array in windows": (array, *WINDOWS),
    "all of an array": (array, *FULL), "Parquet in windows": (parquet, *WINDOWS), "all of Parquet": (parquet, *FULL),
}  # fmt: skip


def delivered(source, *, epochs=1, **knobs):
    knobs = {"tokenize_fn": row_id, "num_workers": 0, "seed": 7, "timeout_s": 240, **knobs}
    with ad.DataLoader(source, epochs=epochs, batch_size=1, collate_fn=list, **knobs) as loader:
        batches = [sample for _ in range(epochs) for batch in loader for sample in batch]
    return [piece.sample for pack in batches for piece in pack] if "packing" in knobs else batches


def place_of(sample):
    """As ``order`` prints it."""
    source = sample.source
    number = {"byte_offset": source.byte_offset, "line": source.line_number()}
    place = number if source.row_number is None else {"row_number": source.row_number}
    return {"position": str(sample.position), "path": source.path, "num_bytes": source.num_bytes, **place}


@pytest.mark.parametrize(("write", "options", "shuffle"), ORDERS.values(), ids=ORDERS)
def test_rows_are_shown_as_a_loader_delivers_them(here, run_json, write, options, shuffle):
    path = write(here)
    samples = delivered(path, epochs=2, shuffle=shuffle)
    words = (path, "--seed", 7, *options)
    lines = ["--lines"] if write is jsonl else []

    found = [run_json("order", *words, "--num", 0, "--epoch", epoch, *lines) for epoch in (0, 1)]
    assert sum(found, []) == [place_of(sample) for sample in samples]

    # Any of them, in any order, by position, and by the place in the file.
    some = [*samples[:: len(samples) // 4], samples[0]]
    *rows, total = run_json("inspect", *words, *ROW_ID, *(f"--position={each.position}" for each in some))
    assert [shown_row(row) for row in rows] == [(str(each.position), int(each.tokens[0])) for each in some]
    assert total["total"]["num_samples"] == len(some)
    of_epoch_0 = [each for each in some if each.position.epoch == 0]
    *rows, _ = run_json("inspect", *words, *ROW_ID, *(f"--row={line_of(each)}" for each in of_epoch_0))
    assert [shown_row(row) for row in rows] == [(str(each.position), int(each.tokens[0])) for each in of_epoch_0]

    # One of the first epoch and one of a later one, by its number.
    for number in (len(samples) // 2 - 1, len(samples) - 1):
        (row,) = run_json("sample", *words, "--ordinal", number)
        assert {name: row[name] for name in place_of(samples[number])} == place_of(samples[number])
        assert json.loads(row["row"])["id"] == samples[number].tokens[0]


def shown_row(row):
    ((piece,),) = [text["pieces"] for text in row["texts"]]
    return row["position"], int(piece["text"])


def line_of(sample):
    place = place_of(sample)
    return f"{place['path']}:{place.get('line', place.get('row_number'))}"


PACKS = [*in_order("packing", {"SoftPacking": {"max_length": 8}}), *in_order("plan_packs", True)]
PACKS += [*in_order("batch_size", 1), *in_order("shuffle", {"method": "keyed"})]
PACKED: dict[str, Any] = {"packing": ad.SoftPacking(max_length=8), "plan_packs": True, "shuffle": "full"}
XTUNER = [*in_order("packing", {"XTunerPacking": {"max_length": 8, "seed": 5}}), *in_order("batch_size", 1)]
PLANNED: dict[str, Any] = {
    "only rows that yield a sample": (
        in_order("shuffle", {"method": "keyed", "only_kept": True}), {"shuffle": ad.RowShuffle(only_kept=True)}
    ),
    "planned packs": (PACKS, PACKED),
    "planned packs of like length": (
        [*PACKS, *in_order("length_grouping", {"window": 4})], PACKED | {"length_grouping": ad.LengthGrouping(window=4)}
    ),
    "XTuner's packs": ([*XTUNER, *in_order("shuffle", True)], {"packing": XTunerPacking(max_length=8, seed=5)}),
}  # fmt: skip


@pytest.mark.parametrize(("settings", "knobs"), PLANNED.values(), ids=PLANNED)
def test_an_order_that_depends_on_samples_is_that_of_the_loader(here, run_json, settings, knobs):
    path = jsonl(here)
    samples = delivered(path, **{"tokenize_fn": TWO_THIRDS[1], **knobs})
    found = run_json("order", path, "--seed", 7, *TWO_THIRDS, "--num", 0, *settings)
    assert len(found) == NUM_ROWS * 2 // 3
    assert [row["position"] for row in found] == [str(sample.position) for sample in samples]
    assert [row["byte_offset"] for row in found] == [sample.source.byte_offset for sample in samples]


@pytest.mark.parametrize("write", [array, parquet])
def test_a_row_number_beyond_the_end_is_named(here, run_json, write):
    path = write(here)
    (found,) = run_json("inspect", path, *ROW_ID, "--row", NUM_ROWS, status=1)
    assert f"there is no row at {path}:{NUM_ROWS}: " in found["error"]["message"]


def test_a_row_index_that_a_run_has_made_is_used(here, run_json, monkeypatch):
    path, cache = jsonl(here), {"folder": str(here / "kept")}
    samples = delivered(path, shuffle="full", cache=cache)
    change(monkeypatch, index_blocks=lambda *_: pytest.fail("the rows were counted again"))
    (found,) = run_json("order", path, *FULL[0], "--seed", 7, "--num", 1, *in_order("cache", cache))
    assert found["position"] == str(samples[0].position)


GRIN = "\U0001f600"  # four bytes

# Turns: ``tests/transcripts/turns.md`` has the rest


def test_another_text_than_that_of_the_chat_and_a_tokenizer_without_a_template_have_no_turns(small_tokenizer, tmp_path):
    bare = variant(small_tokenizer, tmp_path / "no_template", config={"chat_template": None})
    chat = json.dumps({"messages": [user("Is it far?"), assistant("No.")]}).encode()
    pair = b'{"prompt": "The sky is", "chosen": " blue.", "rejected": " a fish."}'
    assert Turns(ad.ChatTokenizeFn(small_tokenizer), ["messages"])(chat, "other") == []
    assert Turns(ad.PreferenceTokenizeFn(bare), ["prompt", "chosen"])(pair, "The sky is blue.") == []


@pytest.mark.thorough
def test_what_is_shown_as_trained_is_what_a_loader_trains(test_data, run_json):
    data, tokenizer = test_data / "chat_sft" / "chat_sft.jsonl", test_data / "tokenizers" / "gpt2-bpe-50k"
    fn = ad.ChatTokenizeFn(str(tokenizer), max_length=900, overlong="truncate_left")
    with ad.DataLoader(str(data), tokenize_fn=fn, seed=3, num_workers=0) as loader:
        samples = {str(sample.position): sample for sample in loader.get_next_batch(40, timeout_s=240)}
    words = (data, "--seed", 3, "--tokenizer", tokenizer, "--max-length", 900, "--set", "overlong=truncate_left")

    *rows, _ = run_json("inspect", *words, "--num", 40)

    assert {row["dropped"] for row in rows} <= {None, "no_trained_tokens"}
    for row in rows:
        for text in row["texts"]:
            by_token = [piece["is_trained"] for piece in text["pieces"] for _ in range(piece["start"], piece["stop"])]
            labels = samples[row["position"]].labels
            assert by_token == (labels != -100).tolist()
            assert (text["num_tokens"], text["num_trained"]) == (len(labels), sum(by_token))


def byte_level():
    """A token for each byte, and three that hold parts of characters."""
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"Ġa": 256, "ðŁ": 257, "ĺĢ": 258}  # " a", and the two halves of the grin
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("ð", "Ł"), ("ĺ", "Ģ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>"), AddedToken("<|a b|>")])
    tokenizer.add_tokens([AddedToken("<think>")])
    return tokenizer


def with_byte_fallback():
    """As SentencePiece vocabularies are: words with a mark for the space, and bytes for what is not in them."""
    words = ["<unk>", "<s>", "▁", "▁a", "a", "b", "▁b", ".", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def word_pieces():
    vocab = {"[UNK]": 0, "[SEP]": 1, "play": 2, "##ing": 3, "now": 4, ".": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[SEP]"])
    return tokenizer


BYTE_LEVEL = byte_level()
BYTES = {char: BYTE_LEVEL.token_to_id(char) for char in pre_tokenizers.ByteLevel.alphabet()}


def ids_of(text):
    return BYTE_LEVEL.encode(text).ids


def pieces_of(ids, is_trained=None, tokenizer=BYTE_LEVEL):
    """They cover the tokens without a gap, and none is both trained and context."""
    wanted = is_trained or [False] * len(ids)
    pieces = TokenTexts(tokenizer)(ids, wanted)
    assert [piece.is_trained for piece in pieces for _ in range(piece.start, piece.stop)] == wanted
    assert all(one.stop == other.start for one, other in pairwise(pieces))
    return pieces


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=30), data=st.data())
def test_the_texts_of_byte_level_tokens_are_the_text_whatever_is_trained(text, data):
    ids = ids_of(text)
    is_trained = data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    assert text_of(pieces_of(ids)) == text
    assert text_of(pieces_of(ids, is_trained)).encode("utf-8", "surrogateescape").decode() == text


@given(
    text=st.text(st.sampled_from(f"xé字{GRIN}"), min_size=1, max_size=6), cut=st.integers(0, 24), end=st.integers(0, 24)
)
def test_a_cut_leaves_bytes_and_no_character_that_is_not_there(text, cut, end):
    one_a_byte = [BYTES[char] for char in BYTE_LEVEL.pre_tokenizer.pre_tokenize_str(text)[0][0]]
    last = max(0, len(one_a_byte) - end)
    shown = text_of(pieces_of(one_a_byte[cut:last]))
    assert shown.encode("utf-8", "surrogateescape") == text.encode()[cut:last]
    assert "\ufffd" not in shown


HALVES = [("\udcf0\udc9f", ""), ("\udc98\udc80", "")]
NAMED = [HALVES[0], *((name, name) for name in ("<|end|>", "<|a b|>")), ("<think>", "")]
PIECES = {
    "a character that is split over tokens is one piece": (ids_of(f"x{GRIN}y"), [], [("x", ""), (GRIN, ""), ("y", "")]),
    "of a character that is trained in part the bytes are shown": (ids_of(GRIN), [False, True], HALVES),
    "a special token has a name and ends a character": (
        [ids_of(GRIN)[0], *ids_of("<|end|><|a b|><think>")], [], NAMED
    ),
    "an id that is not known is its number": ([99_999], [], [("99999", "99999")]),
}  # fmt: skip


@pytest.mark.parametrize(("ids", "is_trained", "wanted"), PIECES.values(), ids=PIECES)
def test_tokens_are_shown_as_pieces(ids, is_trained, wanted):
    assert [(piece.text, piece.name) for piece in pieces_of(ids, is_trained)] == wanted


@pytest.mark.parametrize(
    ("tokenizer", "text", "wanted"),
    [
        (word_pieces(), "playing now. play [SEP]", ["play", "ing", " now", ".", " play", "[SEP]"]),
        (with_byte_fallback(), f"a b.é {GRIN}a", ["a", " b", ".", "é", " ", GRIN, "a"]),
    ],
)
def test_the_texts_of_other_tokens_are_joined_as_the_tokenizer_joins_them(tokenizer, text, wanted):
    assert [piece.text for piece in pieces_of(tokenizer.encode(text).ids, tokenizer=tokenizer)] == wanted


def test_text_that_looks_like_a_special_token_is_text_and_a_row_that_is_too_long_is_not_read(jsonl_file):
    tokenizer = byte_level()
    tokenizer.encode_special_tokens = True
    pieces = pieces_of(tokenizer.encode("<|end|>").ids, tokenizer=tokenizer)
    assert (text_of(pieces), {piece.name for piece in pieces}) == ("<|end|>", {""})
    source = ad.JsonlSource(str(jsonl_file([{"id": 1}, {"id": 1, "text": "x" * 500}])), max_row_bytes=100)
    short, long = OrderView(source, row_id, shuffle=False).rows()
    assert (len(short.raw) > 0, long.raw) == (True, b"")
    assert str(long.fault).startswith("AD108 ")


SPECIAL = "<|end|>"
ITEM = re.compile(r"⟨U\+(?P<code>[0-9A-F]{4,6})⟩|⟨0x(?P<byte>[0-9A-F]{2})⟩|⟨(?P<special>[^⟩]*)⟩|(?P<char>.)")
CHARS = st.one_of(
    st.characters(),
    st.sampled_from("\n\t\r\x1b ⟦⟧⟨⟩↵⇥│\\"),
    st.integers(0x80, 0xFF).map(lambda byte: chr(0xDC00 + byte)),
)


def plain(texts, *, turns=(), context=0):
    """One token for each text; a third value is the name of a special one."""
    pieces = [
        Piece(number, number + 1, text, rest[0] if rest else "", is_trained)
        for number, (text, is_trained, *rest) in enumerate(texts)
    ]
    masked = MaskedText("", pieces, [Turn(*turn) for turn in turns], True)
    return plain_text(lines_of(masked, context))


def read_back(shown):
    """The characters and special tokens that are shown, each with whether it is trained and whether it is special."""
    found = []
    for line in shown.split("\n"):
        is_trained = False
        for item in ITEM.finditer(line.partition("│ ")[2]):
            char = item["char"]
            if char in {"⟦", "⟧"}:
                is_trained = char == "⟦"
            elif item["special"] is not None:
                found.append((item["special"], is_trained, True))
            else:
                code = item["code"] and chr(int(item["code"], 16))
                byte = item["byte"] and chr(0xDC00 + int(item["byte"], 16))
                found.append((code or byte or {"↵": "\n", "⇥": "\t"}.get(char, char), is_trained, False))
    return found


TOKENS = st.one_of(
    st.tuples(st.text(CHARS, max_size=6), st.booleans()), st.tuples(st.just(SPECIAL), st.booleans(), st.just(SPECIAL))
)


@given(texts=st.lists(TOKENS, max_size=8))
def test_what_is_shown_without_colour_can_be_read_back_and_controls_no_terminal(texts):
    shown = plain(texts)
    assert all(char.isprintable() for char in shown if char != "\n")
    assert all(line.startswith("│ ") for line in shown.split("\n") if shown)
    num_alike = max((len(list(group)) for key, group in groupby(texts) if len(key) == 3), default=0)
    if num_alike <= 3:  # more of them are counted
        wanted = []
        for text, is_trained, *special in texts:
            wanted += [(text, is_trained, True)] if special else [(char, is_trained, False) for char in text]
        assert read_back(shown) == wanted


FIFTY = [(str(number % 10), False) for number in range(50)]
SHOWN = {
    "a turn that begins within a token begins with the next one": (
        plain([("abc", False), ("d", True)], turns=[(0, "u"), (2, "as")]), "u  │ abc\nas │ ⟦d⟧"
    ),
    "long context is left out in its middle, and what is trained never is": (
        plain([*FIFTY, *[("x", True)] * 50], context=5), f"│ 012⟨… 45 tokens …⟩89⟦{'x' * 50}⟧"
    ),
    "context that is short enough is whole": (plain(FIFTY[:5], context=5), "│ 01234"),
    "padding is counted": (plain([("a", True), *[("<pad>", False, "<pad>")] * 1200]), "│ ⟦a⟧⟨<pad> ×1,200⟩"),
    "of a special token's name, brackets are shown by numbers": (
        plain([("x", False, "⟩\n")]), "│ ⟨U+27E9U+000A⟩"
    ),
    "a text without tokens has no lines": (plain([]), ""),
}  # fmt: skip


@pytest.mark.parametrize(("shown", "wanted"), SHOWN.values(), ids=SHOWN)
def test_text_is_shown_in_lines(shown, wanted):
    assert shown == wanted
