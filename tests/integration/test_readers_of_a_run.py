"""All readers of a run see the same: its statistics, dashboards, the telemetry, and the page about it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, NamedTuple

import pytest

from asyncdata import BadRows, Mix, Part, Telemetry
from asyncdata.telemetry.reader import read
from tests.support.html_page import read_page
from tests.support.inner import change
from tests.support.loaders import make
from tests.support.loading import NEVER_S, write_rows
from tests.support.report_pages import page_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from asyncdata import DataLoader

NUM_ROWS = 60
BATCH_SIZE = 7


def drops_and_fails(row):
    if row["id"] == 20:
        raise ValueError("no good")

    return "too long" if row["id"] % 3 == 0 else [row["id"]] * (1 + row["id"] % 5)


class Counts(NamedTuple):
    """What a reader says of a run; None: it does not tell."""

    samples: int | None
    tokens: int | None
    dropped: dict[str, int] | None
    sources: dict[str, int]


class Delivered(NamedTuple):
    """A run that is over. ``folder`` has its telemetry in ``run``."""

    folder: Path
    loader: DataLoader
    counts: Counts

    @property
    def statistics(self):
        return self.loader.statistics()


@pytest.fixture(scope="module", params=[0, 1], ids=["in a thread", "by a worker"])
def delivered(request, tmp_path_factory):
    """Two epochs of a mixture, of which some rows are dropped and some are bad."""
    folder = tmp_path_factory.mktemp("run")
    paths = {name: write_rows(folder / f"{name}.jsonl", NUM_ROWS) for name in ("math", "code")}
    mix = Mix({name: Part(path, when_done="leave") for name, path in paths.items()})
    telemetry = Telemetry(folder=str(folder / "run"))
    knobs = {"batch_size": BATCH_SIZE, "epochs": 1, "bad_rows": BadRows(policy="skip"), "num_workers": request.param}

    with pytest.MonkeyPatch.context() as patch:
        change(patch, close_of_telemetry_s=NEVER_S)  # as for each test: the last records are there
        with make(mix, drops_and_fails, telemetry=telemetry, **knobs) as loader:
            samples = [sample for batch in loader for sample in batch]
    sources = Counter(sample.source_name for sample in samples)
    dropped = {"too long": 2 * NUM_ROWS // 3, "bad row AD421": 2}
    counts = Counts(len(samples), sum(len(one.tokens) for one in samples), dropped, dict(sources))
    return Delivered(folder, loader, counts)


def by_statistics(run):
    now = run.statistics
    return Counts(now.samples_total, now.tokens_total, now.dropped_total, samples_of(now.by_source))


def samples_of(parts):
    return {name: part.samples for name, part in parts.items()}


def by_flat_numbers(run):
    flat = run.statistics.to_dict()
    names = {"too long": "too_long", "bad row AD421": "bad_row_ad421"}
    dropped = {reason: flat[f"asyncdata_dropped_{name}_total"] for reason, name in names.items()}
    sources = {name: flat[f"asyncdata_source_{name}_samples_total"] for name in ("math", "code")}
    return Counts(flat["asyncdata_samples_total"], flat["asyncdata_tokens_total"], dropped, sources)


def by_prometheus(run):
    line = re.compile(r'^asyncdata_(\w+?)(?:\{\w+="(.*)"\})? (\S+)$', re.MULTILINE)
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, label, value in line.findall(run.statistics.to_prometheus()):
        found[name][label] = int(float(value))
    samples, tokens = found["samples_total"][""], found["tokens_total"][""]
    return Counts(samples, tokens, found["dropped_total"], found["source_samples_total"])


def by_telemetry(run):
    totals = read(run.folder / "run").totals
    return Counts(totals.samples, totals.tokens, totals.dropped, samples_of(totals.by_source))


def by_page(run):
    tables = page_about(run).tables
    dropped = {row[0]: int(row[1]) for row in tables["dropped-table"][1:]}
    sources = {row[0]: int(row[3].replace(",", "")) for row in tables["mix-table"][1:]}
    samples = sum(int(row[1].replace(",", "")) for row in tables["lengths-chart-data"][1:])
    return Counts(samples, None, dropped, sources)


def page_about(run):
    return read_page(page_of(run.folder / "run", run.folder / "page.html"))


READERS: list[Callable[[Delivered], Counts]] = [by_statistics, by_flat_numbers, by_prometheus, by_telemetry, by_page]


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_every_reader_of_a_run_has_its_counts(delivered, reader):
    found = reader(delivered)
    assert found == delivered.counts._replace(tokens=found.tokens and delivered.counts.tokens)


def test_the_page_finds_dropped_and_bad_rows_by_their_reason_and_their_text(delivered):
    shown = page_about(delivered).data
    dropped = [one for one in shown if "dropped: too long" in one["states"]]
    lines = {line for name in ("math", "code") for line in (delivered.folder / f"{name}.jsonl").read_text().split("\n")}
    assert len(dropped) == 2 * 16
    assert {one["texts"][0][1][0][0] for one in dropped} <= lines
    assert [one["place"] for one in shown if one["state"] == "bad"].count(f"{delivered.folder}/math.jsonl:21") == 1


def test_the_page_may_load_nothing_and_run_its_own_program_alone_and_its_controls_have_names(delivered):
    page = page_of(delivered.folder / "run", delivered.folder / "page.html")
    found = read_page(page)
    (program,) = re.findall(rb"<script>(.*?)</script>", page, re.DOTALL)
    (rule,) = (values["content"] for _, values in found.tags if values.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(program).digest()).decode()
    assert rule.split("; ")[0] == "default-src 'none'"
    assert f"; script-src 'sha256-{digest}'; " in rule
    labels = re.findall(rb"<label[^>]*>\s*\w[^<]*(?:<kbd>.</kbd>\s*)?<(?:input|select)", page)
    assert len(labels) == sum(tag in {"input", "select"} for tag, _ in found.tags) > 5
    assert not re.search(rb"<(button|a)[^>]*>\s*</", page)
    shown = [values for _, values in found.tags if values.get("role") in {"img", "region", "group"}]
    assert all(values.get("aria-label") or values.get("aria-labelledby") for values in shown)
