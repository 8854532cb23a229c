"""The command line: commands, options, exit codes. What a command does lies in ``asyncdata.cli.commands``."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from asyncdata.cli.arguments import (
    add_data,
    add_order_options,
    add_tokenizer,
    add_workers,
    command,
    position,
    seconds,
    whole,
)
from asyncdata.cli.maintenance import add_upkeep
from asyncdata.cli.option_names import as_options
from asyncdata.cli.output import Output
from asyncdata.cli.standard_streams import StdoutError, discard, hold_descriptors, quiet_stderr, writing_stdout
from asyncdata.errors import AsyncDataError
from asyncdata.import_path import resolve_path
from asyncdata.version import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ("main", "make_parser")

_ABOUT = "An async, exactly resumable prefetching data loader for LLM post-training."
_EPILOG = """\
exit status:
  0    done
  1    the library refused, or failed: one message says what, where and the way out
  2    the command line is wrong
  130  interrupted by Ctrl-C

Data goes to stdout, everything else to stderr. With --json data is JSON, and so is an error: {"error": {...}}.
Colours obey NO_COLOR; without a terminal there are none.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    :param argv: the arguments; None for those of this process.
    :raises SystemExit: with status 2 for a wrong command line, with 0 after ``--help``.
    """
    hold_descriptors()
    with quiet_stderr():
        if sys.stdout is None:
            Output().say("asyncdata: stdout is closed: open it, or send it to /dev/null", "red")
            return 1

        try:
            return _run(*_parsed(argv))
        except BrokenPipeError:  # the reader has closed its end, as `head` does
            discard(sys.stdout)
            return 0
        except StdoutError as error:
            discard(sys.stdout)
            Output().say(f"asyncdata: cannot write to stdout: {error}", "red")
            return 1


def _parsed(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Output]:
    parser = make_parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.exit(2, parser.format_help())

    args = parser.parse_args(argv)
    _check(args, parser)
    return args, Output(as_json=args.json)


def _run(args: argparse.Namespace, output: Output) -> int:
    try:
        return int(resolve_path(f"asyncdata.cli.commands.{args.run}")(args, output))
    except KeyboardInterrupt:
        output.say("\ninterrupted", "yellow")
        return 130
    except BrokenPipeError:
        raise
    except (AsyncDataError, OSError) as error:
        _report(error, args, output)
        return 1


def _report(error: Exception, args: argparse.Namespace, output: Output) -> None:
    name, message = type(error).__name__, as_options(str(error), vars(args))
    output.say(f"asyncdata: {name}: {message}", "red")
    if output.as_json:
        output.json({"error": {"type": name, "message": message}})


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        """Of argparse's, which takes no notice of a stdout that cannot be written."""
        if file is not sys.stdout:
            super()._print_message(message, file)
            return

        with writing_stdout():
            file.write(message)
            file.flush()


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = _Parser(
        prog="asyncdata", description=_ABOUT, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"asyncdata {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_demo(commands)
    _add_run(commands)
    _add_order(commands)
    _add_sample(commands)
    _add_inspect(commands)
    _add_bench(commands)
    add_upkeep(commands)
    return parser


def _add_demo(commands: Any) -> None:
    parser = command(
        commands,
        "demo",
        "demo:run",
        "kill a run with SIGKILL, resume it, and prove that nothing was lost, repeated or reordered",
        "The data are questions about the docstrings of this Python's standard library, the tokenizer is one that "
        "comes with asyncdata; nothing is downloaded. Exit status 1 if the two sequences differ.",
    )
    parser.add_argument("--keep", metavar="DIR", help="keep data, snapshot and records in DIR")
    parser.add_argument("--rows", metavar="N", type=whole(500), default=5000, help="at most so many rows (%(default)s)")
    parser.add_argument("--num-workers", metavar="N", type=whole(1), help="worker processes of the first run")


def _add_run(commands: Any) -> None:
    parser = command(
        commands,
        "run",
        "run:run",
        "stream data as a trainer would, with snapshots and resume, and say how fast it was",
        "Ends after --epochs or --num-batches, whichever comes first; batches before a resume count.",
    )
    add_data(parser)
    add_tokenizer(parser)
    add_order_options(parser)
    add_workers(parser)
    parser.add_argument("--batch-size", metavar="N", type=whole(1), default=32, help="samples per batch (%(default)s)")
    parser.add_argument("--num-batches", metavar="N", type=whole(1), help="end after so many batches")
    parser.add_argument(
        "--epochs", metavar="K", type=whole(1), help="end after so many epochs (1, unless --num-batches is given)"
    )
    parser.add_argument("--buffer-size", metavar="N", type=whole(1), help="samples read ahead (as many as it takes)")
    parser.add_argument("--snapshot", metavar="FILE", help="write snapshots to FILE, and one at the end")
    parser.add_argument(
        "--snapshot-every", metavar="N", type=whole(1), default=100, help="batches between snapshots (%(default)s)"
    )
    parser.add_argument(
        "--digest",
        default="positions",
        choices=("positions", "tokens"),
        help="what snapshots have a digest of, for asyncdata verify (%(default)s)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from --snapshot, if it is there")
    parser.add_argument(
        "--allow-changed",
        metavar="WHAT",
        action="append",
        default=[],
        choices=("data", "tokenizer", "template", "tokenize_fn", "seed", "order"),
        help="resume though WHAT differs: data, tokenizer, template, tokenize_fn, seed or order; may be repeated",
    )
    parser.add_argument(
        "--same-rows", action="store_true", help="resume though files have other names, if their content is the same"
    )
    parser.add_argument(
        "--record", metavar="FILE", help="append a JSON line per delivered sample: its position, place and digest"
    )
    parser.add_argument(
        "--step-s",
        metavar="S",
        type=seconds,
        default=0.0,
        help="wait so long after each batch, as for a training step",
    )
    parser.add_argument(
        "--progress",
        default="auto",
        choices=("auto", "bar", "plain", "json", "none"),
        help="how it is shown on stderr; auto is a bar on a terminal and plain lines elsewhere (%(default)s)",
    )


def _add_order(commands: Any) -> None:
    parser = command(
        commands,
        "order",
        "order:run",
        "print positions of the order D: which row comes when",
        "Nothing is tokenized; the windows that are printed are read. One line a row, tab-separated: position "
        "(epoch:window:row), path, byte offset, length in bytes. With --json, one object a line.",
    )
    add_data(parser)
    add_tokenizer(parser)
    add_order_options(parser)
    parser.add_argument("--epoch", metavar="E", type=whole(0), default=0, help="the epoch (%(default)s)")
    parser.add_argument("--window", metavar="W", type=whole(0), help="only this window; without it, all of the epoch")
    parser.add_argument(
        "--from",
        metavar="R",
        dest="first",
        type=whole(0),
        default=0,
        help="the first row to print, counted from 0 in the window or the epoch (%(default)s)",
    )
    parser.add_argument(
        "--num", metavar="N", type=whole(0), default=20, help="how many rows to print; 0 for all (%(default)s)"
    )
    parser.add_argument("--lines", action="store_true", help="print line numbers too; reads each file up to the row")


def _add_sample(commands: Any) -> None:
    parser = command(
        commands,
        "sample",
        "sample:run",
        "print one row: its file, line and byte offset, the raw row, and its tokens if a tokenizer is given",
        "By --position it costs the read of one window. By --ordinal without --tokenizer, every row counts as a "
        "sample, and each window before it is read. By --ordinal with --tokenizer, rows that the run dropped do not "
        "count: all rows before it are tokenized, in worker processes, which takes as long as the run took; a "
        "--snapshot of the run shortens the way.",
    )
    add_data(parser)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--position", metavar="E:W:R", type=position, help="by its position, as in 0:3:128")
    which.add_argument(
        "--ordinal", metavar="N", type=whole(0), help="by its number in the run, from 0, across epochs (Sample.index)"
    )
    add_tokenizer(parser)
    add_order_options(parser)
    add_workers(parser)
    parser.add_argument("--snapshot", metavar="FILE", help="count --ordinal on from this snapshot of the run")


def _add_inspect(commands: Any) -> None:
    parser = command(
        commands,
        "inspect",
        "inspect:run",
        "print the tokens of some rows as text, and with --loss-mask which of them are trained",
        "Trained text is coloured on a terminal and stands in ⟦ ⟧ elsewhere, the rest is context; in ⟨ ⟩ are special "
        "tokens, and characters that cannot be shown. A row that becomes no sample says why. With --json, one object "
        "a row and one for the total.",
    )
    add_data(parser)
    parser.add_argument("--loss-mask", action="store_true", help="show which tokens are trained, and count them")
    parser.add_argument(
        "--num", metavar="N", type=whole(0), default=3, help="the first rows of the order; 0 for all (%(default)s)"
    )
    parser.add_argument(
        "--position", metavar="E:W:R", type=position, action="append", help="this row in place of them; may be repeated"
    )
    parser.add_argument(
        "--row",
        metavar="FILE:LINE",
        action="append",
        help="likewise by its line, or its row number where there are no lines; FILE: may be left out",
    )
    parser.add_argument(
        "--context-tokens",
        metavar="N",
        type=whole(0),
        default=400,
        help="show at most so many tokens of context at a stretch; 0 for all (%(default)s)",
    )
    parser.add_argument(
        "--color", default="auto", choices=("always", "never", "auto"), help="auto: on a terminal (%(default)s)"
    )
    add_tokenizer(parser)
    add_order_options(parser)


def _add_bench(commands: Any) -> None:
    parser = command(
        commands,
        "bench",
        "bench:run",
        "measure on your data: the tokenizer's limit, how near the loader comes, the first batch, waits, memory",
        "Each figure comes with what it means and the knob to turn. Other programs on the machine disturb it; run it "
        "twice.",
    )
    add_data(parser)
    add_tokenizer(parser)
    add_order_options(parser)
    parser.add_argument(
        "--num-workers", metavar="N", type=whole(0), help="worker processes; 0 for a thread (one per CPU, at most 8)"
    )
    parser.add_argument(
        "--on-bad-row",
        default="raise",
        choices=("raise", "skip"),
        help="stop at a bad row, or pass it over (%(default)s)",
    )
    # Data may go round many times, and with it each bad row.
    parser.set_defaults(max_bad_rows=None, quarantine_path="", log_excerpts=True)
    parser.add_argument(
        "--buffer-size", metavar="N", type=whole(1), default=1000, help="samples read ahead (%(default)s)"
    )
    parser.add_argument(
        "--seconds", metavar="S", type=seconds, default=30.0, help="about how long to measure (%(default)s)"
    )


def _check(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuse options that do not go together."""
    if args.run == "run:run":
        if args.resume and args.snapshot is None:
            parser.error("--resume needs --snapshot FILE to go on from")

        for path in (args.snapshot, args.record):
            if path is not None and os.path.exists(path) and not args.resume:
                parser.error(f"{path} is there already: add --resume to go on from there, or name another file")

    if args.run in ("run:run", "order:run", "sample:run", "inspect:run", "bench:run", "quarantine:retry"):
        is_told = args.tokenizer is not None or args.tokenize_fn is not None
        if not is_told and args.run not in ("sample:run", "order:run"):
            parser.error("--tokenizer DIR or --tokenize-fn PATH is required")

        if args.kind is not None and args.tokenize_fn is not None:
            parser.error("--kind chooses a tokenize function; leave it, or --tokenize-fn")

        if args.run == "sample:run" and args.snapshot is not None and not (is_told and args.ordinal is not None):
            parser.error("--snapshot shortens the way to --ordinal with --tokenizer; it does nothing else")


# A command's module is imported when it runs: `--help` need not wait for the library.
