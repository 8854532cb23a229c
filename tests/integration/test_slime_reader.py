"""Rows as slime's own code reads them. Needs a checkout of slime, which ASYNCDATA_SLIME names."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncdata import DataLoader, EndOfData, JsonlSource
from asyncdata.integrations.slime.rows import SlimeTokenizeFn
from tests.support.slime import slime_module
from tests.unit.tokenization import run

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEMPLATE = (
    "{{ eos_token }}{% if tools is not none %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ part.text if part.type == 'text' else '<|' ~ part.type ~ '|>' }}{% endfor %}"
    "{% endif %}<|im_end|>{% endfor %}{{ extra }}"
)


@pytest.fixture(scope="module")
def slime() -> SimpleNamespace:
    """slime's reader, and its sample."""
    data, types = slime_module("utils.data"), slime_module("utils.types")
    return SimpleNamespace(
        dataset=data.Dataset, read_file=data.read_file, filter_long_prompt=data.filter_long_prompt, sample=types.Sample
    )


@pytest.fixture(scope="module")
def tokenizer(small_tokenizer: Path) -> Any:
    transformers = pytest.importorskip("transformers", reason="slime's tokenizers are those of transformers")
    return transformers.AutoTokenizer.from_pretrained(small_tokenizer, model_max_length=10**9)


def plain(value: Any) -> str:
    """Values that are equal and of the same types have the same text; NaN equals itself."""
    return json.dumps(value)


def merged(prompt: Any) -> Any:
    """Texts side by side as one: slime cuts the text of a row without media into single characters."""
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return prompt

    result = []
    for message in prompt:
        parts: list[Any] = []
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if is_text(part) and parts and is_text(parts[-1]):
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
            else:
                parts.append(part)
        result.append({**message, "content": parts} if parts else message)
    return result


def is_text(part: Any) -> bool:
    return isinstance(part, dict) and set(part) == {"type", "text"} and isinstance(part["text"], str)


def theirs(slime: SimpleNamespace, path: Path, tokenizer: Any, fn: SlimeTokenizeFn) -> list[str]:
    """The samples of slime's dataset."""
    dataset = slime.dataset(
        str(path),
        tokenizer,
        None,
        fn.max_length,
        prompt_key=fn.prompt_key,
        multimodal_keys=fn.multimodal_keys,
        label_key=fn.label_key,
        tool_key=fn.tool_key,
        metadata_key=fn.metadata_key,
        apply_chat_template=fn.apply_chat_template,
        apply_chat_template_kwargs=fn.apply_chat_template_kwargs,
    )
    return [plain([merged(each.prompt), each.label, each.metadata]) for each in dataset.samples]


def ours(fn: SlimeTokenizeFn, lines: list[bytes]) -> list[str]:
    chunk = run(fn.open(), lines)
    found = (
        (chunk.value("prompt", n), chunk.value("label", n), chunk.value("metadata", n))
        for n in range(chunk.num_samples)
    )
    return [plain([merged(prompt), label, metadata or {}]) for prompt, label, metadata in found]


def loaded(fn: SlimeTokenizeFn, path: Path) -> list[str]:
    """The samples of one epoch, through the loader."""
    found = []
    source = JsonlSource(str(path), python_lines=True)
    knobs: dict[str, Any] = {
        "shuffle": False,
        "epochs": 1,
        "num_workers": 0,
        "bad_rows": {"policy": "skip", "max": None},
    }
    with DataLoader(source, tokenize_fn=fn, **knobs) as loader:
        while True:
            try:
                (group,) = loader.get_samples(1)
            except EndOfData:
                return found
            sample = group[0]
            found.append(plain([merged(sample.prompt), sample.label, sample.metadata]))


TEXT = st.text(st.sampled_from('ab \n\t"\\<>|é\u3000\u2028😀\ud800'), max_size=6)
MARKED = st.lists(TEXT | st.sampled_from(["<image>", "<video>", "<audio>"]), max_size=5).map("".join)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
PART = st.fixed_dictionaries({"type": st.just("text"), "text": TEXT}) | st.fixed_dictionaries(
    {"type": st.just("image"), "image": TEXT}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": MARKED | st.lists(PART, max_size=3)},
    optional={"note": VALUE, "reasoning_content": st.none() | TEXT},
)
TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": st.dictionaries(TEXT, VALUE, max_size=2)})
TOOLS = st.lists(TOOL, max_size=2)
MEDIA = st.lists(TEXT | st.fixed_dictionaries({"type": st.just("image"), "image": TEXT}), max_size=3)
ROW = st.fixed_dictionaries(
    {"input": MARKED | st.lists(MESSAGE, min_size=1, max_size=3), "label": VALUE},
    optional={
        "metadata": VALUE | st.dictionaries(TEXT, VALUE, max_size=3),
        "tools": TOOLS | TOOLS.map(json.dumps),
        "images": MEDIA | st.none(),
        "videos": MEDIA,
        "sounds": st.none(),
    },
)
ODD_ROW = st.fixed_dictionaries({}, optional=dict.fromkeys(("input", "label", "metadata", "tools", "images"), VALUE))
SETTINGS = st.fixed_dictionaries(
    {
        "apply_chat_template": st.booleans(),
        "multimodal_keys": st.sampled_from([None, {}, {"image": "images"}, {"image": "images", "video": "videos"}]),
        "label_key": st.sampled_from([None, "label"]),
        "tool_key": st.sampled_from([None, "tools"]),
    }
)


def line_of(row: dict[str, Any], is_ascii: bool) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=is_ascii).encode()
    except UnicodeEncodeError:
        return json.dumps(row).encode()


@pytest.fixture
def differential(
    slime: SimpleNamespace, tokenizer: Any, small_tokenizer: Path, tmp_path: Path
) -> Callable[[dict[str, Any], bytes], tuple[list[str] | None, list[str]]]:
    """A row by slime, None where its start fails, and by ours."""

    def read(given: dict[str, Any], line: bytes) -> tuple[list[str] | None, list[str]]:
        kwargs = {"chat_template": TEMPLATE, "extra": "x"}
        fn = SlimeTokenizeFn(str(small_tokenizer), apply_chat_template_kwargs=kwargs, **given)
        path = tmp_path / "row.jsonl"
        path.write_bytes(line + b"\n")
        try:
            expected = theirs(slime, path, tokenizer, fn)
        except Exception:  # whatever it is, training does not start
            expected = None
        return expected, ours(fn, [line])

    return read


relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


@relaxed
@given(row=ROW, given_settings=SETTINGS, is_ascii=st.booleans())
def test_any_row_of_the_right_shape_is_read_as_slime_reads_it(
    differential: Any, row: dict[str, Any], given_settings: dict[str, Any], is_ascii: bool
) -> None:
    expected, found = differential(given_settings, line_of(row, is_ascii))

    assert found == (expected or [])


def refused_by_us(row: dict[str, Any], given_settings: dict[str, Any]) -> bool:
    """Whether slime may take what is most likely a mistake: see ``SlimeTokenizeFn``."""
    prompt, has_media = row.get("input"), bool(given_settings["multimodal_keys"])
    messages = prompt if isinstance(prompt, list) and given_settings["apply_chat_template"] else []
    return (
        "input" not in row
        or (isinstance(prompt, dict) and (has_media or given_settings["apply_chat_template"]))
        or (isinstance(row.get("images"), str | dict) and has_media)
        or not all(isinstance(message, dict) and message.get("role") is not None for message in messages)
    )


@relaxed
@given(row=ODD_ROW, given_settings=SETTINGS, max_length=st.sampled_from([None, 0, 5]))
def test_a_row_of_any_shape_is_taken_where_slime_takes_it(
    differential: Any, row: dict[str, Any], given_settings: dict[str, Any], max_length: int | None
) -> None:
    expected, found = differential({**given_settings, "max_length": max_length}, line_of(row, True))

    if refused_by_us(row, given_settings):
        assert found == []
    elif expected is None and given_settings["tool_key"] and "tools" in row and row["tools"] is None:
        assert len(found) <= 1  # no tools
    else:
        assert found == (expected or [])


MALFORMED = [
    b"", b"   ", b"\t\r", b"{", b'{"input": "cut', b'{"input": "a"} x', b'{"input": \x01}', b'{"input": "a\tb"}',
    b"{'input': 'a'}", b'{"input": "a",}', b'{"input": 01}', b"nul", b'{"input": .5}', b'{"input": "\\x41"}',
    b'{"input": "a", "other": 01}', b'{"input": "a", "other": "\\ud8"}', b'{"input": "a", "other": "\x02"}',
]  # fmt: skip
FINE = [
    b'{"input": "a", "other": NaN}', b'{"input": "b", "x": [-Infinity, 1e400, "\\ud800"]}', b' {"input": "c"} \r',
    '\u3000{"input": "d"}\u00a0'.encode(), b'{"input": "k"}\r{"input": "l"}', b'\r\x0c{"input": "m"}\x1f\r\n',
    b'{"input": "e", "input": "f"}', '{"input": "g\u2028h\u0085i"}'.encode(),
    b'{"input": "\\ud83d\\ude00", "metadata": {"n": NaN, "big": 123456789012345678901234567890, "z": -0, "f": 1.0}}',
    b'{"input": "j", "metadata": {"e": 1E5, "tiny": 1e-400, "long": 0.1000000000000000055511151231257827021181583404}}',
]  # fmt: skip


def test_malformed_lines_are_passed_over_and_the_others_keep_their_order(
    slime: SimpleNamespace, tokenizer: Any, tmp_path: Path
) -> None:
    fn = SlimeTokenizeFn("none")
    for seed in range(20):
        lines = [*MALFORMED, *FINE, *FINE]
        random.Random(seed).shuffle(lines)
        path = tmp_path / f"{seed}.jsonl"
        path.write_bytes(b"\n".join(lines) + b"\n" * (seed % 2))

        expected = theirs(slime, path, tokenizer, fn)

        assert len(expected) == 2 * (len(FINE) + 1)  # one of them is two lines
        assert loaded(fn, path) == expected


@relaxed
@given(
    row=ROW,
    place=st.floats(0, 1),
    removed=st.integers(0, 3),
    put_in=st.text('{}[]",:\\\\/eE+-.019nulltrefas \t\x00\x1f\x7f\u00a0', max_size=3),
)
def test_a_damaged_line_is_passed_over_where_slime_passes_over_it(
    slime: SimpleNamespace, tmp_path: Path, row: dict[str, Any], place: float, removed: int, put_in: str
) -> None:
    text = json.dumps(row)
    at = int(place * len(text))
    line = (text[:at] + put_in + text[at + removed :]).encode()
    path = tmp_path / "row.jsonl"
    path.write_bytes(line)

    parsed = [value for value in slime.read_file(str(path)) if isinstance(value, dict) and "input" in value]

    chunk = run(SlimeTokenizeFn("none", metadata_key=None, tool_key=None).open(), [line])
    assert [plain(chunk.value("prompt", n)) for n in range(chunk.num_samples)] == [
        plain(each["input"]) for each in parsed
    ]


def test_a_byte_order_mark_costs_slime_its_first_row_and_us_none(
    slime: SimpleNamespace, tokenizer: Any, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + b"\n".join(b'{"input": "%d"}' % number for number in range(4)))

    expected = theirs(slime, path, tokenizer, SlimeTokenizeFn("none"))

    assert len(expected) == 3
    assert loaded(SlimeTokenizeFn("none"), path)[1:] == expected


def test_each_line_of_the_reader_is_one_of_ours(slime: SimpleNamespace, tmp_path: Path) -> None:
    """slime's ``read_file`` without a slice, on the file of its own slicing tests."""
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"id": number, "input": ""}) + "\n" for number in range(10)))

    assert [row["id"] for row in slime.read_file(str(path))] == list(range(10))
    assert [json.loads(text)[1] for text in loaded(SlimeTokenizeFn("none", label_key="id"), path)] == list(range(10))


# slime's tests/test_filter_long_prompt.py, with a tokenizer that counts: (shows an image, is long)
FILTER_CASES = [
    [(True, False), (False, False)] * 3,
    [(True, False), (False, True), (False, False), (True, True), (False, False), (True, False)],
    [(True, False)] * 4,
    [(False, False)] * 4,
    [(False, False), (False, True), (False, False)],
    [(False, True)] * 2 + [(False, False)],
]


@pytest.mark.parametrize("case", FILTER_CASES, ids=str)
def test_prompts_that_are_too_long_are_left_out_and_the_others_keep_their_order(
    slime: SimpleNamespace, tokenizer: Any, small_tokenizer: Path, case: list[tuple[bool, bool]]
) -> None:
    rows = [
        {"input": f"p{number}" + " long" * (50 * is_long) + "<image>" * shows, **({"images": ["i"]} if shows else {})}
        for number, (shows, is_long) in enumerate(case)
    ]
    template = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}"
    fn = SlimeTokenizeFn(
        str(small_tokenizer),
        max_length=20,
        apply_chat_template=True,
        apply_chat_template_kwargs={"chat_template": template},
        multimodal_keys={"image": "images"},
    )

    chunk = run(fn.open(), rows)

    samples = [slime.sample(prompt=row["input"].replace("<image>", "")) for row in rows]
    expected = [sample.prompt for sample in slime.filter_long_prompt(samples, tokenizer, None, 20)]
    assert [chunk.value("prompt", number) for number in range(chunk.num_samples)] == expected
    assert expected == [sample.prompt for sample, (_, is_long) in zip(samples, case, strict=True) if not is_long]


@pytest.mark.parametrize("max_length", [0, 1, 2, 3, 8, 12, None])
def test_the_filter_counts_as_slime_counts(
    slime: SimpleNamespace, tokenizer: Any, small_tokenizer: Path, tmp_path: Path, max_length: int | None
) -> None:
    pieces = ["", "a", "the ", "self.", "<|im_end|>", " \n", "é", "日本", "\t", "function "]
    rng = random.Random(7)
    rows = [{"input": "".join(rng.choices(pieces, k=rng.randrange(6)))} for _ in range(300)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    for applied in (False, True):
        fn = SlimeTokenizeFn(str(small_tokenizer), max_length=max_length, apply_chat_template=applied)
        assert ours(fn, path.read_bytes().splitlines()) == theirs(slime, path, tokenizer, fn)


def test_a_list_of_messages_is_not_filtered(
    slime: SimpleNamespace, tokenizer: Any, small_tokenizer: Path, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"input": [{"role": "user", "content": "why " * number}]} for number in (1, 99)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    fn = SlimeTokenizeFn(str(small_tokenizer), max_length=1)

    assert loaded(fn, path) == theirs(slime, path, tokenizer, fn)
    assert len(loaded(fn, path)) == 2


SETS = ["gsm8k/test.slime", "gsm8k/test.chat", "chat_sft/chat_sft"]


@pytest.mark.parametrize("max_length", [None, 120])
@pytest.mark.parametrize("file", SETS)
def test_real_rows_are_read_as_slime_reads_them(
    slime: SimpleNamespace, test_data: Path, file: str, max_length: int | None
) -> None:
    transformers = pytest.importorskip("transformers", reason="slime's tokenizers are those of transformers")
    folder, path = test_data / "tokenizers" / "qwen2-bpe-151k", test_data / f"{file}.jsonl"
    theirs_tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=10**9)
    key = "messages" if "sft" in file else "input"

    for applied in (False, True):
        fn = SlimeTokenizeFn(str(folder), prompt_key=key, apply_chat_template=applied, max_length=max_length)
        expected = theirs(slime, path, theirs_tokenizer, fn)
        assert ours(fn, path.read_bytes().splitlines()) == expected
        assert len(expected) > 10
