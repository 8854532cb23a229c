"""Runs a command, and turns what it raises into a message and an exit status. The commands are in ``commands``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click
from click.shell_completion import shell_complete

from asyncdata.cli.arguments import as_options, commands
from asyncdata.cli.output import Output, StdoutError, discard, guarded_streams, logging_to_stderr, writing_stdout
from asyncdata.core.errors import AsyncDataError
from asyncdata.core.imports import resolve_path

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import SimpleNamespace


_COMPLETE = "_ASYNCDATA_COMPLETE"
"""The variable by which a shell asks for the script that completes, and for completions."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    :param argv: the arguments; None for this process's.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    with guarded_streams():
        if sys.stdout is None:
            Output().say("asyncdata: stdout is closed: open it, or send it to /dev/null", "red")
            return 1

        try:
            if instruction := os.environ.get(_COMPLETE):
                return shell_complete(commands, {}, "asyncdata", _COMPLETE, instruction)

            # `_run` handles the errors of commands; an OSError here is one of writing --help or --version.
            with writing_stdout(), commands.make_context("asyncdata", words, obj=_run) as context:
                return int(commands.invoke(context))
        except click.exceptions.Exit as done:  # --help or --version
            return done.exit_code
        except click.ClickException as error:
            error.show(sys.stderr)
            return error.exit_code
        except BrokenPipeError:  # the reader has closed its end, as `head` does
            discard(sys.stdout)
            return 0
        except StdoutError as error:
            discard(sys.stdout)
            Output().say(f"asyncdata: cannot write to stdout: {error}", "red")
            return 1


def _run(path: str, args: SimpleNamespace) -> int:
    """Run the function of a command."""
    output = Output(as_json=args.json)
    try:  # the command's module is imported here: `--help` need not wait for the library
        with logging_to_stderr(is_verbose=args.verbose):
            return int(resolve_path(f"asyncdata.cli.commands.{path}")(args, output))
    except KeyboardInterrupt:
        output.say("\ninterrupted", "yellow")
        return 130
    except BrokenPipeError:
        raise
    except (AsyncDataError, OSError) as error:
        _report(error, args, output)
        return 1


def _report(error: Exception, args: SimpleNamespace, output: Output) -> None:
    name, message = type(error).__name__, as_options(str(error), vars(args))
    notes = [f"\n{as_options(note, vars(args))}" for note in getattr(error, "__notes__", ())]
    output.say("".join([f"asyncdata: {name}: {message}", *notes]), "red")
    if output.as_json:
        output.json({"error": {"type": name, "message": message}})
