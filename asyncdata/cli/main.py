"""Runs a command, and turns what it raises into a message and an exit status. The commands are in ``commands``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from asyncdata.cli.arguments import as_options, make_parser
from asyncdata.cli.output import Output, StdoutError, discard, hold_descriptors, logging_to_stderr, quiet_stderr
from asyncdata.core.errors import AsyncDataError
from asyncdata.core.import_path import resolve_path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ("main", "make_parser")


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
    for error in filter(None, (check(args) for check in args.checks)):
        parser.error(error)
    return args, Output(as_json=args.json)


def _run(args: argparse.Namespace, output: Output) -> int:
    try:  # the command's module is imported here: `--help` need not wait for the library
        with logging_to_stderr(is_verbose=args.verbose):
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
