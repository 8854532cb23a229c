"""The statistics for Prometheus and OpenTelemetry: every number, under its name, with its type and labels."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, Mix, SourceStatistics, Statistics
from asyncdata.loader.exposition import measurements
from asyncdata.workers.base import WorkerState

if TYPE_CHECKING:
    from pathlib import Path

REASON = 'it has "quotes", a \\ and\na line'


def part_of(number: int) -> SourceStatistics:
    return SourceStatistics(samples=number, tokens=10 * number, epoch=1, dropped={"max_length": 2}, wait=0.5)


def made(**changes: Any) -> Statistics:
    """Statistics whose fields all have different values."""
    numbers = {name: number for number, name in enumerate(Statistics.__struct_fields__)}
    fields = numbers | {
        "dropped_total": {"max_length": 7, REASON: 2},
        "noted_total": {"straddling_token": 3},
        "excluded_rows": {},
        "unpacked_samples_total": {},
        "unpacked_tokens_total": {"tail": 11},
        "data_wait_seconds_total": 1.5,
        "by_source": {name: part_of(number) for number, name in enumerate(("math.easy", "code"), 70)},
        "workers": [WorkerState(state="busy", pid=1, busy_s=0.5), WorkerState(state="idle", pid=2)],
    }
    return Statistics(**fields | changes)


def test_every_number_is_in_the_text_and_the_parser_of_prometheus_reads_it() -> None:
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")
    statistics = made()

    families = {family.name: family for family in parser.text_string_to_metric_families(statistics.to_prometheus())}

    found = {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    expected = {
        (f"asyncdata_{one.field}", (one.label,) if one.label else ()): one.value for one in measurements(statistics)
    }
    assert found == expected
    assert found["asyncdata_dropped_total", (("reason", REASON),)] == 2
    assert found["asyncdata_workers", (("state", "starting"),)] == 0
    assert found["asyncdata_source_samples_total", (("source", "math.easy"),)] == 70
    assert found["asyncdata_source_tokens_total", (("source", "code"),)] == 710
    assert families["asyncdata_source_epoch"].type == "gauge"
    assert families["asyncdata_samples"].type == "counter"
    assert families["asyncdata_ready_samples"].type == "gauge"
    assert families["asyncdata_waits"].documentation == "calls that had to wait for data."


def test_every_field_is_measured_and_explained() -> None:
    statistics = made(excluded_rows={"a": 1}, unpacked_samples_total={"a": 1})

    of_sources = set(part_of(1).to_dict("source"))
    fields = set(Statistics.__struct_fields__) - {"by_source"} | of_sources
    assert {one.field for one in measurements(statistics)} == fields
    assert statistics.to_prometheus().count("# HELP") == len(fields)
    for line in statistics.to_prometheus().splitlines():
        assert not line.startswith("# HELP") or len(line.split()) > 3, line


def test_labels_of_the_caller_are_on_every_number() -> None:
    text = made().to_prometheus({"rank": "3", "run": 'a"b'})

    numbers = [line for line in text.splitlines() if not line.startswith("#")]
    assert numbers
    assert all('rank="3",run="a\\"b"' in line for line in numbers)
    assert 'asyncdata_dropped_total{rank="3",run="a\\"b",reason="max_length"} 7' in numbers


def numbers_of(reader: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], tuple[float, str]]:
    data = reader.get_metrics_data()
    if data is None:
        return {}

    return {
        (metric.name, tuple(sorted(point.attributes.items()))): (point.value, metric.unit)
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
        for point in metric.data.data_points
    }


def test_opentelemetry_reads_the_numbers_of_a_loader_until_it_is_gone(tmp_path: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="needs opentelemetry-sdk")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    from asyncdata.integrations.opentelemetry import observe

    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    loader = DataLoader(str(path), tokenize_fn=odd, num_workers=0, buffer_size=4)
    with loader:
        observe(loader, provider.get_meter("test"), {"rank": "1"})
        loader.get_next_batch(3)

        found = numbers_of(reader)

        rank = ("rank", "1")
        assert found["asyncdata.samples", (rank,)] == (3, "{sample}")
        assert found["asyncdata.ready_bytes", (rank,)][1] == "By"
        assert found["asyncdata.data_wait_seconds", (rank,)][1] == "s"
        dropped = loader.statistics().dropped_total["tokenize_fn"]
        assert found["asyncdata.dropped", (rank, ("reason", "tokenize_fn"))] == (dropped, "")
    del loader
    gc.collect()

    assert numbers_of(reader) == {}
    provider.shutdown()


def test_opentelemetry_reads_the_parts_of_a_mixture(tmp_path: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics", reason="needs opentelemetry-sdk")
    export = pytest.importorskip("opentelemetry.sdk.metrics.export")
    from asyncdata.integrations.opentelemetry import observe

    for name in ("math", "code"):
        (tmp_path / f"{name}.jsonl").write_text('{"n": 1}\n{"n": 3}\n')
    reader = export.InMemoryMetricReader()
    provider = sdk.MeterProvider(metric_readers=[reader])
    mix = Mix({name: str(tmp_path / f"{name}.jsonl") for name in ("math", "code")}, quota=2)
    with DataLoader(mix, tokenize_fn=odd, num_workers=0, buffer_size=4) as loader:
        observe(loader, provider.get_meter("test"))
        loader.get_next_batch(4)

        found = numbers_of(reader)

    for name in ("math", "code"):
        assert found["asyncdata.source_samples", (("source", name),)] == (2, "{sample}")
    provider.shutdown()


def test_flat_numbers_have_no_parts_without_a_mixture() -> None:
    assert not [name for name in made(by_source={}).to_dict() if "source" in name]
    assert made().to_dict()["asyncdata_source_math_easy_samples_total"] == 70


def odd(row: dict[str, Any]) -> list[int] | None:
    return [row["n"]] if row["n"] % 2 else None
