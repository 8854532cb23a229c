"""The speeds that asyncdata promises, measured here: ``python -m tests.benchmarks.run --tokenizer DIR``.

Prints a table of S1 to S20 with goals, medians, ranges and verdicts, writes it as JSON, and draws the plots of the
docs. Everything is measured in fresh processes; what is compared is interleaved. ``--quick`` shows that everything
runs (small inputs, few rounds: its figures mean nothing, and it gives no verdict). Figures are kept in the JSON as they
come: ``--resume`` continues an interrupted run.
"""

from __future__ import annotations

import argparse
import compileall
import json
import os
import platform
import signal
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncdata
from asyncdata import __version__
from asyncdata.workers.machine import num_usable_cpus
from tests.benchmarks.figures.cache import token_cache
from tests.benchmarks.figures.chat import chat_template
from tests.benchmarks.figures.exactness import exactness
from tests.benchmarks.figures.labelled import chat_sft, long_context
from tests.benchmarks.figures.memory import memory
from tests.benchmarks.figures.mixtures import mixtures
from tests.benchmarks.figures.order import order
from tests.benchmarks.figures.packed import packed_sft
from tests.benchmarks.figures.peers import beside_fast_streaming, beside_streaming
from tests.benchmarks.figures.recorded import recorded
from tests.benchmarks.figures.remote import object_store
from tests.benchmarks.figures.start import first_batch, resume
from tests.benchmarks.figures.throughput import first_run, scaling, throughput
from tests.benchmarks.figures.trainer import data_wait, rollouts, trainer_cost
from tests.benchmarks.framework import Bench, Row
from tests.benchmarks.watching import MeasurementError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("FIGURES", "main")

FIGURES: dict[str, Callable[[Bench], None]] = {
    "S1": exactness,
    "S2": throughput,
    "S2b": first_run,
    "S3": beside_streaming,
    "S4": beside_fast_streaming,
    "S5": first_batch,
    "S6": memory,
    "S7": resume,
    "S8": trainer_cost,
    "S9": data_wait,
    "S10": token_cache,
    "S11": order,
    "S12": scaling,
    "S13": rollouts,
    "S14": chat_template,
    "S15": chat_sft,
    "S16": packed_sft,
    "S17": long_context,
    "S18": object_store,
    "S19": mixtures,
    "S20": recorded,
}
LIBRARIES = ("tokenizers", "numpy", "msgspec", "anyio", "gigatoken", "fastokens")


class Results:
    """The JSON file: what was measured, and with what."""

    def __init__(self, path: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self.content: dict[str, Any] = {
            "asyncdata": __version__,
            "python": platform.python_version(),
            "machine": platform.platform(),
            "cpus": num_usable_cpus(),
            "versions": _versions(),
            "settings": settings,
            "figures": {},
        }
        if resume and path.exists():
            before = json.loads(path.read_text())
            if before["settings"] != settings:
                raise SystemExit(
                    f"{path} is of other settings, {before['settings']}; name another --json, or no --resume"
                )

            self.content["figures"] = before["figures"]

    def add(self, code: str, figure: dict[str, Any]) -> None:
        """Keep a figure at once."""
        self.content["figures"][code] = figure
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.content, indent=1))
        temporary.rename(self.path)

    @property
    def figures(self) -> dict[str, Any]:
        """Those there are."""
        found: dict[str, Any] = self.content["figures"]
        return found


def _versions() -> dict[str, str]:
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _parser() -> argparse.ArgumentParser:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncdata_benchmarks"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokenizer", metavar="DIR", help="a folder with a real model's tokenizer.json (the largest of the test data)"
    )
    parser.add_argument("--folder", metavar="DIR", type=Path, default=folder, help="for inputs: 4 GB (%(default)s)")
    parser.add_argument("--peers", metavar="DIR", type=Path, help="for the peers' environments: 5 GB (FOLDER/peers)")
    parser.add_argument("--only", metavar="S,...", default=",".join(FIGURES), help="which figures (all)")
    parser.add_argument("--quick", action="store_true", help="small inputs, few rounds, no verdicts: does it run?")
    parser.add_argument("--large-mb", metavar="N", type=int, default=2000, help="size of the large input (%(default)s)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="where results are kept (FOLDER/results.json)")
    parser.add_argument("--resume", action="store_true", help="measure only what that file does not have yet")
    parser.add_argument("--plots", metavar="DIR", type=Path, help="draw the plots of what the file has into DIR")
    return parser


def _tokenizer_of_the_test_data() -> str | None:
    """The largest, where ASYNCDATA_TEST_DATA names a folder with some."""
    folder = Path(os.environ.get("ASYNCDATA_TEST_DATA", "-")) / "tokenizers"
    found = sorted(folder.glob("*/tokenizer.json"), key=lambda path: (path.stat().st_size, path))
    return str(found[-1].parent) if found else None


def _checked(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parser.parse_args()
    args.tokenizer = args.tokenizer or _tokenizer_of_the_test_data()
    if args.tokenizer is None:
        parser.error(
            "--tokenizer DIR is required where ASYNCDATA_TEST_DATA names none: a folder with a real model's "
            "tokenizer.json. A vocabulary trained on the spot would be smaller than any that is used"
        )

    if not (Path(args.tokenizer) / "tokenizer.json").is_file():
        parser.error(f"{args.tokenizer} has no tokenizer.json")

    args.only = [code.strip() for code in args.only.split(",")]
    if unknown := [code for code in args.only if code not in FIGURES]:
        parser.error(f"there is no figure {', '.join(unknown)}; there are {', '.join(FIGURES)}")

    args.tokenizer = str(Path(args.tokenizer).resolve())
    args.folder = args.folder.resolve()
    args.folder.mkdir(parents=True, exist_ok=True)
    args.peers = (args.peers or args.folder / "peers").resolve()
    args.json = args.json or args.folder / ("quick.json" if args.quick else "results.json")
    return args


def _take(bench: Bench, code: str) -> dict[str, Any]:
    """The figure; if something of it fails, what there is of it, and why."""
    try:
        return bench.taken(FIGURES[code])
    except MeasurementError as error:
        bench.note(code, "not measured to the end", error.last_words)
        print(error, file=sys.stderr)
        return {"rows": [asdict(row) for row in bench.rows], "data": bench.data, "failed": str(error)}


def main() -> None:
    """Measure, keep, and sum up."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is being measured ends too
    args = _checked(_parser())
    bench = Bench(
        args.folder, args.tokenizer, args.peers, args.large_mb, quick=args.quick, draws=args.plots is not None
    )
    settings = {"tokenizer": Path(args.tokenizer).name, "quick": args.quick, "large_mb": bench.large_mb}
    results = Results(args.json, settings, resume=args.resume)
    tempfile.tempdir = str(args.folder)
    compileall.compile_dir(os.path.dirname(asyncdata.__file__), quiet=1)  # as an installer does
    for backend in bench.fast_backends:
        bench.probe("prove", path=bench.input(1), tokenizer=bench.tokenizer, backend=backend)
    for code in args.only:
        if args.resume and "failed" not in results.figures.get(code, {"failed": ""}):
            print(*(Row(**row) for row in results.figures[code]["rows"]), sep="\n", flush=True)
            continue

        results.add(code, _take(bench, code))
    _sum_up(results)
    if args.plots is not None:
        from tests.benchmarks.plots import draw

        draw(results.content, args.plots)
    if any("failed" in results.figures[code] for code in args.only):
        raise SystemExit(1)


def _sum_up(results: Results) -> None:
    rows = [Row(**row) for figure in results.figures.values() for row in figure["rows"]]
    with_goal = [row for row in rows if row.is_reached is not None]
    print(f"\n{sum(bool(row.is_reached) for row in with_goal)} of {len(with_goal)} goals reached; in {results.path}")
    for row in with_goal:
        if not row.is_reached:
            print(row)
    seconds = {code: figure.get("seconds") for code, figure in results.figures.items()}
    print("seconds:", ", ".join(f"{code} {value:.0f}" for code, value in seconds.items() if value is not None))


if __name__ == "__main__":
    main()
