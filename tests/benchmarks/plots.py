"""The plots of the docs, out of the suite's JSON: ``python -m tests.benchmarks.plots results.json docs/plots``.

Small SVG files, the same bytes for the same figures, without a background: grey text and mid colours can be read on
white and on black.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("PLOTS", "draw")

MAX_RATIO_FOR_MINOR_LABELS = 12
GREY = "#7f868f"
COLOURS = {"ours": "#2f81f7", "hf": "#e5892e", "torchdata": "#a371f7", "grain": "#2ea88a", "mosaic": "#d2557f"}
COLOURS |= {"litdata": "#8c7a5b", "legacy": "#c0483f"}
LABELS = {
    "ours": "asyncdata",
    "hf": "Hugging Face streaming",
    "torchdata": "StatefulDataLoader",
    "grain": "Grain",
    "mosaic": "Mosaic Streaming",
    "litdata": "LitData",
    "legacy": "all rows first",
}
STYLE = {
    "svg.hashsalt": "asyncdata",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.marker": "o",
    "lines.markersize": 4,
}


def _name(contestant: str) -> str:
    kind, _, backend = contestant.partition(" ")
    return LABELS.get(kind, kind) + (f", {backend}" if backend else "")


def _colour(contestant: str) -> str:
    return COLOURS.get(contestant.partition(" ")[0], GREY)


def throughput(axes: Any, figures: dict[str, Any]) -> None:
    """Bars: steady and end to end."""
    results = dict(figures["S3"]["data"]["contest"])
    for found in figures.get("S4", {}).get("data", {}).values():
        results |= found["small"]
    names = sorted(results, key=lambda name: statistics.median(results[name]["end_to_end_rows_per_s"]))
    for offset, key, alpha in ((0.2, "steady_rows_per_s", 0.45), (-0.2, "end_to_end_rows_per_s", 1.0)):
        values = [statistics.median(results[name][key]) for name in names]
        places = [number + offset for number in range(len(names))]
        axes.barh(places, values, height=0.38, color=[_colour(name) for name in names], alpha=alpha)
    axes.set_yticks(range(len(names)), [_name(name) for name in names])
    axes.grid(axis="y", visible=False)
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)
    axes.set_xlabel("rows/s: end to end (full), after the first batch (pale)")


def _plain_numbers(*sides: Any) -> None:
    """100 and 1,000 on a logarithmic axis, not powers of ten; and nothing between where that would be crowded."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    for side in sides:
        side.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        low, high = side.get_view_interval()
        few = high / low < MAX_RATIO_FOR_MINOR_LABELS
        side.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}") if few else NullFormatter())


def _against_size(axes: Any, sizes: dict[str, dict[str, list[float]]], what: str) -> None:
    for name, by_size in sizes.items():
        values = [statistics.median(found) for found in by_size.values()]
        axes.plot([float(size) for size in by_size], values, color=_colour(name), label=_name(name))
    axes.set_xscale("log")
    axes.set_yscale("log")
    _plain_numbers(axes.xaxis, axes.yaxis)
    axes.set_xlabel("size of the file, MB")
    axes.set_ylabel(what)
    axes.legend()


def first_batch(axes: Any, figures: dict[str, Any]) -> None:
    """Lines over the file's size."""
    _against_size(axes, figures["S5"]["data"]["sizes"], "first batch, s")


def memory(axes: Any, figures: dict[str, Any]) -> None:
    """S6: memory of all processes over the size of the file."""
    _against_size(axes, figures["S6"]["data"]["sizes"], "memory of all processes, MB")


def resume(axes: Any, figures: dict[str, Any]) -> None:
    """Lines over the position."""
    for name, by_percent in figures["S7"]["data"]["resume"].items():
        values = [statistics.median(found) for found in by_percent.values()]
        axes.plot([float(percent) for percent in by_percent], values, color=_colour(name), label=_name(name))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("resumed at, % of an epoch")
    axes.set_ylabel("first batch, s")
    axes.legend()


def data_wait(axes: Any, figures: dict[str, Any]) -> None:
    """Lines over the trainer's rate."""
    for name, found in figures["S9"]["data"]["by_rate"].items():
        waits = found["waits"]
        axes.plot(
            [100 * float(share) for share in waits],
            [100 * share for share in waits.values()],
            color=_colour(name),
            label=_name(name),
        )
    axes.set_xlabel("the trainer's rate, % of the loader's highest")
    axes.set_ylabel("waiting for data, % of the time")
    axes.legend()


PLOTS: dict[str, tuple[str, Callable[[Any, dict[str, Any]], None]]] = {
    "throughput": ("S3", throughput),
    "first-batch": ("S5", first_batch),
    "memory": ("S6", memory),
    "resume": ("S7", resume),
    "data-wait": ("S9", data_wait),
}
"""By file name: the figure that a plot cannot be without, and what draws it."""


def draw(content: dict[str, Any], folder: Path) -> list[Path]:
    """Every plot whose figures are there."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, (code, paint) in PLOTS.items():
        figure = content["figures"].get(code)
        if figure is None or "failed" in figure:
            print(f"{name}.svg: not drawn, {code} is not measured")
            continue

        with matplotlib.rc_context(STYLE):
            drawing, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
            paint(axes, content["figures"])
            path = folder / f"{name}.svg"
            drawing.savefig(path, format="svg", transparent=True, metadata={"Date": None})
            pyplot.close(drawing)
        written.append(path)
        print(f"{path}: {path.stat().st_size:,} bytes")
    return written


def main() -> None:
    """Draw them out of a file of results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="what the suite wrote")
    parser.add_argument("folder", type=Path, help="where the plots go")
    args = parser.parse_args()
    draw(json.loads(args.results.read_text()), args.folder)


if __name__ == "__main__":
    main()
