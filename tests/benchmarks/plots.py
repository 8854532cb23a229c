"""Results as tables, or as plots in a folder: ``python -m tests.benchmarks.plots results.json [docs/plots]``.

Plots are small SVG files, the same bytes for the same figures, without a background: grey text and mid colours can be
read on white and on black.
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tests.benchmarks.contestants import OURS, PEERS
from tests.benchmarks.figures.peers import KEYS
from tests.benchmarks.framework import Row


def goals_table(content: dict[str, Any]) -> str:
    """Every row that has a goal, and every one that was not measured."""
    rows = [Row(**one) for figure in content["figures"].values() for one in figure["rows"]]
    kept = [row for row in rows if row.goal or row.note]
    shown = [f"| {row.code} | {row.what} | {row.goal} | {row.result} | {row.verdict} |" for row in kept]
    return "\n".join(["| | what | goal | result | |", "|---|---|---|---|---|", *shown])


def contest_table(results: dict[str, dict[str, list[float]]]) -> str:
    """Medians of everyone who went through a file."""
    titles = [f"{what}, {unit}" for what, unit in KEYS.values()]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    for name, found in results.items():
        cells = [f"{statistics.median(found[key]):,.{2 * (unit == 's')}f}" for key, (_, unit) in KEYS.items()]
        lines.append(f"| {_label(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _label(name: str) -> str:
    kind, _, backend = name.partition(" ")
    return PEERS[name][0] if name in PEERS else f"asyncdata, {backend or 'hf'}" if kind == OURS else name


def print_tables(content: dict[str, Any]) -> None:
    where = f"{content['cpus']} CPUs, Python {content['python']}, asyncdata {content['asyncdata']}"
    versions = ", ".join(f"{name} {number}" for name, number in content["versions"].items())
    print(f"{where}; {versions}\n\n{goals_table(content)}")
    data = {code: figure.get("data", {}) for code, figure in content["figures"].items()}
    if contest := data.get("S3", {}).get("contest"):
        print(f"\n{contest_table(contest)}")
    for backend, found in data.get("S4", {}).items():
        for size, results in found.items():
            print(f"\n{backend}, {size} input\n\n{contest_table(results)}")


MAX_RATIO_FOR_MINOR_LABELS = 12
GREY = "#7f868f"
LOOKS = {
    "ours": ("asyncdata", "#2f81f7"),
    "hf": ("Hugging Face streaming", "#e5892e"),
    "torchdata": ("StatefulDataLoader", "#a371f7"),
    "grain": ("Grain", "#2ea88a"),
    "mosaic": ("Mosaic Streaming", "#d2557f"),
    "litdata": ("LitData", "#8c7a5b"),
    "legacy": ("all rows first", "#c0483f"),
}
"""What a contestant is called, and its colour."""
GREYS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
STYLE = dict.fromkeys(GREYS, GREY) | {
    "svg.hashsalt": "asyncdata",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.marker": "o",
    "lines.markersize": 4,
}


def _look(contestant: str) -> tuple[str, str]:
    kind, _, backend = contestant.partition(" ")
    name, colour = LOOKS.get(kind, (kind, GREY))
    return name + (f", {backend}" if backend else ""), colour


def throughput(axes: Any, figures: dict[str, Any]) -> None:
    """Bars: steady and end to end."""
    results = dict(figures["S3"]["data"]["contest"])
    for found in figures.get("S4", {}).get("data", {}).values():
        results |= found["small"]
    names = sorted(results, key=lambda name: statistics.median(results[name]["end_to_end_rows_per_s"]))
    colours = [_look(name)[1] for name in names]
    for offset, key, alpha in ((0.2, "steady_rows_per_s", 0.45), (-0.2, "end_to_end_rows_per_s", 1.0)):
        values = [statistics.median(results[name][key]) for name in names]
        axes.barh([number + offset for number in range(len(names))], values, height=0.38, color=colours, alpha=alpha)
    axes.set_yticks(range(len(names)), [_look(name)[0] for name in names])
    axes.grid(axis="y", visible=False)
    _logarithmic(axes, "x")
    axes.set_xlabel("rows/s: end to end (full), after the first batch (pale)")


def _logarithmic(axes: Any, *sides: str) -> None:
    """With 100 and 1,000 on the axis, not powers of ten; and nothing between where that would be crowded."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    plain = FuncFormatter(lambda value, _: f"{value:,.10g}")
    for side in sides:
        axes.set(**{f"{side}scale": "log"})
    for axis in (getattr(axes, f"{side}axis") for side in sides):
        low, high = axis.get_view_interval()
        axis.set_major_formatter(plain)
        axis.set_minor_formatter(plain if high / low < MAX_RATIO_FOR_MINOR_LABELS else NullFormatter())


def _lines(axes: Any, found: dict[str, dict[str, Any]], xlabel: str, ylabel: str, scale: float = 1) -> None:
    """A line for each contestant; ``scale`` makes per cent of shares."""
    for contestant, by_place in found.items():
        values = [value if isinstance(value, list) else [value] for value in by_place.values()]
        label, colour = _look(contestant)
        places = [scale * float(place) for place in by_place]
        axes.plot(places, [scale * statistics.median(value) for value in values], color=colour, label=label)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.legend()


def first_batch(axes: Any, figures: dict[str, Any]) -> None:
    _lines(axes, figures["S5"]["data"]["sizes"], "size of the file, MB", "first batch, s")
    _logarithmic(axes, "x", "y")


def memory(axes: Any, figures: dict[str, Any]) -> None:
    _lines(axes, figures["S6"]["data"]["sizes"], "size of the file, MB", "memory of all processes, MB")
    _logarithmic(axes, "x", "y")


def resume(axes: Any, figures: dict[str, Any]) -> None:
    _lines(axes, figures["S7"]["data"]["resume"], "resumed at, % of an epoch", "first batch, s")
    axes.set_ylim(bottom=0)


def data_wait(axes: Any, figures: dict[str, Any]) -> None:
    waits = {name: found["waits"] for name, found in figures["S9"]["data"]["by_rate"].items()}
    _lines(axes, waits, "the trainer's rate, % of the loader's highest", "waiting for data, % of the time", 100)


PLOTS: dict[str, tuple[str, Any]] = {
    "throughput": ("S3", throughput),
    "first-batch": ("S5", first_batch),
    "memory": ("S6", memory),
    "resume": ("S7", resume),
    "data-wait": ("S9", data_wait),
}
"""By file name: the figure that a plot cannot be without, and what draws it."""


def draw(content: dict[str, Any], folder: Path) -> list[Path]:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (code, paint) in PLOTS.items():
        if "data" not in content["figures"].get(code, {}) or "failed" in content["figures"][code]:
            print(f"{name}.svg: not drawn, {code} is not measured")
            continue

        with matplotlib.rc_context(STYLE):
            drawing, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
            paint(axes, content["figures"])
            written.append(folder / f"{name}.svg")
            drawing.savefig(written[-1], format="svg", transparent=True, metadata={"Date": None})
            pyplot.close(drawing)
        print(f"{written[-1]}: {written[-1].stat().st_size:,} bytes")
    return written


if __name__ == "__main__":
    results = json.loads(Path(sys.argv[1]).read_text())
    if sys.argv[2:]:
        draw(results, Path(sys.argv[2]))
    else:
        print_tables(results)
