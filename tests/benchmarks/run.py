"""The speeds that asyncdata promises, measured here: ``python -m tests.benchmarks.run --tokenizer DIR``.

Prints a table of S1 to S20 with goals, medians, ranges and verdicts, writes it as JSON, and draws the plots of the
docs. Everything is measured in fresh processes; what is compared is interleaved. ``--quick`` shows that everything
runs (small inputs, few rounds: its figures mean nothing, and it gives no verdict). Figures are kept in the JSON as they
come: ``--resume`` continues an interrupted run.
"""

import argparse
import compileall
import contextlib
import json
import os
import platform
import signal
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import asyncdata
from asyncdata import __version__
from asyncdata.core.settings import resolve_path
from asyncdata.workers.machine import num_usable_cpus
from tests.benchmarks.framework import Bench, MeasurementError, Row

FIGURES = {
    "S1": "speed:exactness",
    "S2": "speed:throughput",
    "S2b": "speed:first_run",
    "S3": "peers:beside_streaming",
    "S4": "peers:beside_fast_streaming",
    "S5": "peers:first_batch",
    "S6": "peers:memory",
    "S7": "peers:resume",
    "S8": "speed:trainer_cost",
    "S9": "speed:data_wait",
    "S11": "speed:order",
    "S12": "speed:scaling",
    "S13": "speed:rollouts",
    "S14": "sft:chat_template",
    "S15": "sft:chat_sft",
    "S16": "sft:packed_sft",
    "S17": "sft:long_context",
    "S18": "remote:object_store",
    "S19": "speed:mixtures",
    "S20": "speed:recorded",
    "S22": "sft:pictures",
    "S27": "sft:videos",
}
"""What takes a figure: a function of a module of :mod:`tests.benchmarks.figures`."""
LIBRARIES = ("tokenizers", "numpy", "msgspec", "anyio", "gigatoken", "fastokens")


class Results:
    """The JSON file: what was measured, and with what."""

    def __init__(self, path: Path, settings: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self.figures, versions = {}, {}
        for name in LIBRARIES:
            with contextlib.suppress(PackageNotFoundError):
                versions[name] = version(name)
        self.content: dict[str, Any] = {
            "asyncdata": __version__,
            "python": platform.python_version(),
            "machine": platform.platform(),
            "cpus": num_usable_cpus(),
            "versions": versions,
            "settings": settings,
            "figures": self.figures,
        }
        before = json.loads(path.read_text()) if resume and path.exists() else {"settings": settings, "figures": {}}
        if before["settings"] != settings:
            raise SystemExit(f"{path} is of other settings, {before['settings']}; name another --json, or no --resume")

        self.figures |= before["figures"]

    def add(self, code: str, figure: dict[str, Any]) -> None:
        """Keep a figure at once."""
        self.figures[code] = figure
        temporary = self.path.with_suffix(".part")
        temporary.write_text(json.dumps(self.content, indent=1))
        temporary.rename(self.path)


def _checked_arguments() -> argparse.Namespace:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncdata_benchmarks"
    data = Path(os.environ.get("ASYNCDATA_TEST_DATA", "-"), "tokenizers").glob("*/tokenizer.json")
    tokenizers = [str(path.parent) for path in sorted(data, key=lambda path: (path.stat().st_size, path))]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    words = "a folder with a real model's tokenizer.json (the largest of those of ASYNCDATA_TEST_DATA)"
    add("--tokenizer", metavar="DIR", default=[None, *tokenizers][-1], help=words)
    add("--folder", metavar="DIR", type=Path, default=folder, help="for inputs: 4 GB (%(default)s)")
    add("--peers", metavar="DIR", type=Path, help="for the peers' environments: 5 GB (FOLDER/peers)")
    add("--only", metavar="S,...", default=",".join(FIGURES), help="which figures (all)")
    add("--quick", action="store_true", help="small inputs, few rounds, no verdicts: does it run?")
    add("--large-mb", metavar="N", type=int, default=2000, help="size of the large input (%(default)s)")
    add("--json", metavar="FILE", type=Path, help="where results are kept (FOLDER/results.json)")
    add("--resume", action="store_true", help="measure only what that file does not have yet")
    add("--plots", metavar="DIR", type=Path, help="draw the plots of what the file has into DIR")
    args = parser.parse_args()
    if args.tokenizer is None:
        parser.error(f"--tokenizer DIR is required: {words}. A vocabulary trained on the spot would be too small")
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
        return bench.taken(resolve_path(f"tests.benchmarks.figures.{FIGURES[code]}"))
    except MeasurementError as error:
        bench.note(code, "not measured to the end", error.last_words)
        print(error, file=sys.stderr)
        return {**bench.kept(), "failed": str(error)}


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is being measured ends too
    args = _checked_arguments()
    draws = args.plots is not None
    bench = Bench(args.folder, args.tokenizer, args.peers, args.large_mb, quick=args.quick, draws=draws)
    settings = {"tokenizer": Path(args.tokenizer).name, "quick": args.quick, "large_mb": bench.large_mb}
    results = Results(args.json, settings, resume=args.resume)
    tempfile.tempdir = str(args.folder)
    compileall.compile_dir(os.path.dirname(asyncdata.__file__), quiet=1)  # as an installer does
    for backend in bench.fast_backends:
        bench.probe("prove", path=bench.input(1), tokenizer=bench.tokenizer, backend=backend)
    for code in args.only:
        if args.resume and "failed" not in results.figures.get(code, {"failed": ""}):
            print(*(Row(**row) for row in results.figures[code]["rows"]), sep="\n", flush=True)
        else:
            results.add(code, _take(bench, code))
    _sum_up(results)
    if draws:
        from tests.benchmarks.plots import draw

        draw(results.content, args.plots)
    if any("failed" in results.figures[code] for code in args.only):
        raise SystemExit(1)


def _sum_up(results: Results) -> None:
    rows = [Row(**row) for figure in results.figures.values() for row in figure["rows"]]
    with_goal = [row for row in rows if row.is_reached is not None]
    print(f"\n{sum(bool(row.is_reached) for row in with_goal)} of {len(with_goal)} goals reached; in {results.path}")
    print(*(row for row in with_goal if not row.is_reached), sep="\n")
    seconds = {code: figure.get("seconds") for code, figure in results.figures.items()}
    print("seconds:", ", ".join(f"{code} {value:.0f}" for code, value in seconds.items() if value is not None))


if __name__ == "__main__":
    main()
