"""Where a bad row lies: every code in every kind of file; and that nothing else about a run changes it."""

import gzip
import json
import random
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asyncdata import (
    BadRows,
    ChatTokenizeFn,
    DataLoader,
    HuggingFaceSource,
    JsonArraySource,
    JsonlSource,
    Limits,
    ParquetSource,
    PreferenceTokenizeFn,
    Shuffle,
)
from asyncdata.demo import tokenizer_folder
from asyncdata.errors import BadRowError, EndOfData, TooManyBadRowsError
from tests.integration.bad_inputs.test_rows import FUNCTIONS, LINES
from tests.support import tokenize_fns, worker_fns
from tests.support.bad_inputs import PACKAGE, deliver, prompts
from tests.support.chats import GENERATION
from tests.support.combinations import each_value
from tests.support.loading import ids
from tests.support.parts import SlimeTokenizeFn
from tests.support.streams import frames

NUM_BEFORE = 3
MARKS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
CHAT = [{"role": "user", "content": "question"}, {"role": "assistant", "content": " answer"}]


class Fault(NamedTuple):
    """A row that is bad.

    :ivar good: what stands in the rows before it.
    :ivar row: as JSON text.
    :ivar needs_workers: whether it takes one down.
    """

    code: str
    good: bytes
    row: bytes
    tokenize_fn: Any
    needs_workers: bool = False


def text(value: Any) -> bytes:
    return json.dumps(value).encode()


GOOD = text({"input": "x", "label": 0})
ID = text({"id": 0})
MARKED = text({"messages": [{"role": "user", "content": MARKS}, CHAT[1]]})
BOTH = text({"messages": CHAT, "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]})
SYSTEM = text({"messages": CHAT, "system": "s"})
CHATS = text({"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": CHAT[:1]})
OF_ROWS = {
    case.code: Fault(case.code, function.good, case.line, function.fn)
    for function in reversed(FUNCTIONS.values())
    for case in reversed([*LINES, *function.cases])
}
"""The first row of each code."""
FAULTS = [
    *OF_ROWS.values(),
    Fault("AD108", GOOD, text({"input": "x" * 5000, "label": 0}), prompts()),
    Fault("AD114", GOOD, text({"input": "<image>", "pictures": []}), "slime"),
    Fault("AD115", text({"messages": CHAT}), BOTH, ChatTokenizeFn(tokenizer_folder(), chat_template=GENERATION)),
    Fault("AD133", text({"messages": CHAT}), SYSTEM, ChatTokenizeFn(tokenizer_folder(), chat_template=GENERATION)),
    Fault("AD411", text({"prompt": "a", "chosen": " b", "rejected": " c"}), CHATS, "no template"),
    Fault("AD414", text({"messages": CHAT}), MARKED, ChatTokenizeFn(tokenizer_folder(), chat_template=GENERATION)),
    Fault("AD422", ID, text({"id": 13}), tokenize_fns.hangs_on_13, needs_workers=True),
    Fault("AD423", ID, text({"id": 13}), tokenize_fns.kills_on_13, needs_workers=True),
    Fault("AD425", ID, text({"id": 1, "do": "negative"}), worker_fns.as_told),
]
NO_ELEMENTS = {"AD101", "AD104", "AD105", "AD119"}
"""An array that has such a row in it is no array."""

ELSEWHERE = {"AD424": "tests/integration/test_planned_packs.py", "AD457": "tests/integration/test_pictured_chats.py"}


def test_every_code_of_a_bad_row_is_provoked():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in Path(PACKAGE).rglob("*.py"))
    raised = set(re.findall(r'(?:RowFault|RowError|Lost|_fault|__init__)\((?:\w+, )?\s*"(AD\d{3})"', sources))
    assert {fault.code for fault in FAULTS} | set(ELSEWHERE) == raised
    for code, name in ELSEWHERE.items():
        assert code in (Path(PACKAGE).parent / name).read_text(encoding="utf-8")


def function_of(fault: Fault, folder: Path) -> Any:
    if fault.tokenize_fn == "slime":
        return SlimeTokenizeFn(tokenizer_folder(), multimodal_keys={"image": "pictures"})

    if fault.tokenize_fn == "no template":
        shutil.copy(Path(tokenizer_folder(), "tokenizer.json"), folder)
        return PreferenceTokenizeFn(str(folder), eos=False)

    return fault.tokenize_fn


TEXTS: dict[str, tuple[str, Callable[[Sequence[bytes]], bytes], Any]] = {
    "plain": ("rows.jsonl", lambda lines: b"\n".join(lines) + b"\n", JsonlSource),
    "gzip": ("rows.jsonl.gz", lambda lines: gzip.compress(b"\n".join(lines)), JsonlSource),
    "zstd": ("rows.jsonl.zst", lambda lines: frames([b"\n".join(lines)]), JsonlSource),
    "array": ("rows.json", lambda lines: b"[" + b"\n,".join(lines) + b"]", JsonArraySource),
}


@pytest.mark.thorough
@pytest.mark.parametrize(("fault", "kind"), each_value({fault.code: fault for fault in FAULTS}, TEXTS.keys()))
def test_a_bad_row_of_a_text_has_line_and_byte(fault, kind, tmp_path):
    if kind == "array" and fault.code in NO_ELEMENTS:
        pytest.skip("an array that has this in it is no array")
    if fault.needs_workers and kind in {"zstd", "array"}:
        pytest.skip("as gzip: what the workers are sent is the same")
    name, write, source_of = TEXTS[kind]
    (tmp_path / name).write_bytes(write([*[fault.good] * NUM_BEFORE, fault.row, fault.good]))
    source = source_of(str(tmp_path / name), max_row_bytes=1000 if fault.code == "AD108" else 1 << 20)

    knobs = {"num_workers": int(fault.needs_workers), "limits": Limits(row_timeout_s=0.3)}
    found = deliver(source, function_of(fault, tmp_path), **knobs)

    begin = 1 if kind == "array" else 0
    offset = begin + NUM_BEFORE * (len(fault.good) + 1 + begin)
    line = None if kind == "array" else NUM_BEFORE + 1
    error = found.error
    assert isinstance(error, BadRowError), found
    assert (error.code, error.path, error.line, error.byte_offset) == (fault.code, source.paths, line, offset)
    assert error.row_number == (None if kind == "plain" else NUM_BEFORE)
    shown = f"{source.paths}:{line} (byte {offset})" if line else f"{source.paths} (row {NUM_BEFORE}, byte {offset})"
    assert str(error).startswith(f"{fault.code} {shown}: ")
    assert len(found.samples) == NUM_BEFORE


COLUMNS: dict[str, Any] = {
    "AD108": ({"input": "y" * 5000, "label": 0}, prompts()),
    "AD111": ({"input": None, "label": 0}, prompts()),
    "AD421": ({"input": "y", "label": 13}, "tests.support.worker_fns:label_of"),
    "AD425": ({"input": "y", "label": -1}, "tests.support.worker_fns:label_of"),
}


def in_parquet(folder: Path, rows: list[dict[str, Any]]) -> Any:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = str(folder / "rows.parquet")
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return ParquetSource(path, max_row_bytes=1000), path


def in_dataset(folder: Path, rows: list[dict[str, Any]]) -> Any:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    path = str(folder / "saved")
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return HuggingFaceSource(path, max_row_bytes=1000), path


def streamed(folder: Path, rows: list[dict[str, Any]]) -> Any:
    dataset = pytest.importorskip("datasets").IterableDataset.from_generator(lambda: iter(rows))
    return HuggingFaceSource(dataset, max_row_bytes=1000), "generator"


@pytest.mark.parametrize(
    ("column", "write"), each_value(list(COLUMNS), {"Parquet": in_parquet, "saved": in_dataset, "streamed": streamed})
)
def test_a_bad_row_of_a_table_has_its_number(column, write, tmp_path):
    row, tokenize_fn = COLUMNS[column]
    good = {"input": "x", "label": 0}
    source, name = write(tmp_path, [*[good] * NUM_BEFORE, row, good])
    found = deliver(source, tokenize_fn)
    error = found.error
    assert isinstance(error, BadRowError), found
    assert (error.code, error.line, error.row_number, error.byte_offset) == (column, None, NUM_BEFORE, -1)
    assert str(error).startswith(f"{column} {error.path} (row {NUM_BEFORE}): ")
    assert error.path.startswith(name)
    assert len(found.samples) == NUM_BEFORE


NUM_ROWS = 400
SHUFFLE = Shuffle(block_bytes=512, window_blocks=4)
KINDS_OF_BAD = [b'{"id":    ', b"null      ", b'{"id": 13}', b'{"id": 1}{"id": 2}', b'{"id": "\xff"}']


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> tuple[Path, set[int]]:
    """400 rows of which 40 are bad, in five ways, and the lines of those."""
    chance = random.Random(5)
    bad = set(chance.sample(range(14, NUM_ROWS), 39)) | {13}
    lines = [
        KINDS_OF_BAD[number % 5] if number in bad - {13} else text({"id": number, "pad": "x" * (number % 50)})
        for number in range(NUM_ROWS)
    ]
    path = tmp_path_factory.mktemp("mixed") / "rows.jsonl"
    path.write_bytes(b"\n".join(lines))
    return path, {number + 1 for number in bad}


SETTINGS = [
    {"num_workers": num_workers, "buffer_size": buffer_size}
    for num_workers, buffer_size in ((0, 1000), (1, 7), (4, 1000))
]


def make(path: Path, **knobs: Any) -> DataLoader:
    settings = {"shuffle": SHUFFLE, "epochs": 1, "timeout_s": 240} | knobs
    return DataLoader(str(path), tokenize_fn=tokenize_fns.fails_on_13, **settings)


def batches_until_the_end(path: Path, **knobs: Any) -> tuple[list[list[int]], str]:
    batches = []
    with make(path, **knobs) as loader:
        try:
            while True:
                batches.append(ids(loader.get_next_batch(5)))
        except EndOfData as end:
            return [*batches, ids(end.samples)], "end"
        except (BadRowError, TooManyBadRowsError) as error:
            return batches, str(error)


@pytest.mark.thorough
@pytest.mark.parametrize("knobs", SETTINGS, ids=str)
def test_rows_are_put_aside_in_one_order_and_shift_nothing(mixed, knobs, tmp_path):
    """The other rows keep their positions: each window is shuffled with its bad rows, which are then left out."""
    path, bad = mixed
    found = []
    for name, settings in (("found", knobs), ("expected", {"num_workers": 0, "buffer_size": 1})):
        file = tmp_path / name
        batches, _ = batches_until_the_end(path, bad_rows=BadRows(policy="quarantine", path=str(file)), **settings)
        found.append(([number for batch in batches for number in batch], file.read_bytes()))
    assert found[0] == found[1]
    rows, records = found[0]
    assert sorted(rows) == [number for number in range(NUM_ROWS) if number + 1 not in bad]
    assert {json.loads(line)["line"] for line in records.splitlines()} == bad
