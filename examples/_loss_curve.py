"""Loss curves as a picture, or as a table where matplotlib is not installed."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

Curve = Mapping[int, float]  # loss by step


def write_curves(path: Path, curves: Mapping[str, Curve], title: str) -> None:
    """Write `path` as PNG, and say so. The last curve is drawn thin and on top."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        path = path.with_suffix(".csv")
        write_table(path, curves)
        print(f"matplotlib is not installed; the losses are in {path}")
        return

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(title=title, xlabel="step", ylabel="loss")
    styles = [{"linewidth": 5, "alpha": 0.35}] * (len(curves) - 1) + [{"linewidth": 1.2, "color": "black"}]
    for (name, curve), style in zip(curves.items(), styles, strict=True):
        axes.plot(list(curve), list(curve.values()), label=name, **style)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    print(f"the losses are drawn in {path}")


def write_table(path: Path, curves: Mapping[str, Curve]) -> None:
    steps = sorted({step for curve in curves.values() for step in curve})
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", *curves])
        table.writerows([step, *(curve.get(step, "") for curve in curves.values())] for step in steps)
