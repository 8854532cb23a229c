"""A text that is repeated takes little room on disk; however much it decodes to, it is read in pieces."""

from __future__ import annotations

import subprocess
import sys

import pytest

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

pytestmark = pytest.mark.thorough

NUM_ROWS, TEXT_BYTES = 2000, 200_000
LIMITS_MB = {"blocks": 250, "samples": 250, "copies": 250, "dataset": 100, "stream": 100}
"""The rows decode to 400 MB. Of Parquet, the first batch of Arrow turns out too large, and takes 51 MB of it."""

# What a run has taken beyond the peak of one that reads the first row alone, which imports what is needed.
RUN = """
import sys
from unittest.mock import patch

import datasets
from asyncdata import DataLoader, IterableSource, ParquetSource
from asyncdata.workers.inline import InlineExecutor

kind, path, num_rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
text = open(path + ".txt").read()
picked = datasets.load_from_disk(path + ".folder")


def short(row):
    return [row["id"]]


def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))


def run(source, **knobs):
    with DataLoader(source, tokenize_fn=short, num_workers=0, batch_size=8, **knobs) as loader:
        return sum(len(loader.get_next_batch(8)) for _ in range(4))


with patch.object(InlineExecutor, "answers_with_samples", new=kind == "samples"):
    sources = {
        "dataset": lambda: picked.select([0] * num_rows),
        "stream": lambda: IterableSource(lambda epoch: ({"id": n, "text": text} for n in range(num_rows))),
    }
    run(ParquetSource(path + ".short"))
    run(picked.select(range(1, 40)))
    before = peak()
    found = run(sources.get(kind, lambda: ParquetSource(path))(), shuffle="full" if kind == "copies" else True)
print(found, peak() - before)
"""


@pytest.mark.parametrize("kind", LIMITS_MB)
def test_a_block_of_any_size_is_decoded_and_answered_in_pieces(tmp_path, kind):
    datasets.disable_progress_bars()
    path = tmp_path / "rows.parquet"
    text = "".join(f"{number}, " for number in range(TEXT_BYTES))[:TEXT_BYTES]
    pq.write_table(pa.table({"id": range(NUM_ROWS), "text": [text] * NUM_ROWS}), path, compression="zstd")
    pq.write_table(pa.table({"id": range(40), "text": ["-"] * 40}), f"{path}.short")
    rows = {"id": range(NUM_ROWS), "text": [text] + ["-"] * (NUM_ROWS - 1)}
    datasets.Dataset.from_dict(rows).save_to_disk(f"{path}.folder")
    (tmp_path / "rows.parquet.txt").write_text(text)
    assert path.stat().st_size < TEXT_BYTES

    done = subprocess.run(
        [sys.executable, "-c", RUN, kind, str(path), str(NUM_ROWS)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "", "HOME": str(tmp_path), "TMPDIR": str(tmp_path)},
    )

    num_samples, grown = map(int, done.stdout.split())
    assert num_samples == 32
    assert grown >> 20 < LIMITS_MB[kind]
