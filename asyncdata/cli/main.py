"""The command line: every command, its options, their checks, and what the help says of them, as objects of click; runs
a command, and turns what it raises into a message and an exit status.

docs/reference/cli.md is made of the objects. What the commands do is in modules of their own; nothing of the library is
imported here, so that ``--help`` is quick.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any

import click
from click.shell_completion import shell_complete

from asyncdata.cli.output import Output, StdoutError, discard, guarded_streams, logging_to_stderr, writing_stdout
from asyncdata.core import __version__
from asyncdata.core.errors import AsyncDataError
from asyncdata.core.settings import resolve_path

Check = Callable[[SimpleNamespace], str | None]


# What click lacks: options in sections, arguments with a help in all its versions, functions imported when they run


class _Integer(click.IntRange):
    name = "integer"  # for "'x' is not a valid integer"; that of click is "integer range"


class _Option(click.Option):
    section = "Options"


class _Argument(click.Argument):
    section = "Arguments"

    def __init__(self, name: str, about: str, **how: Any) -> None:
        super().__init__([name], type=click.Path(), **how)
        self._about = about

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.human_readable_name, self._about


class _Command(click.Command):
    """A command; the whole first sentence about it is in the list of commands.

    :param path: ``module:name`` of its function in ``asyncdata.cli``, which ``ctx.obj`` runs; the name ends
        with the command's own.
    """

    def __init__(self, path: str, about: str, *params: click.Parameter, checks: tuple[Check, ...] = ()) -> None:
        super().__init__(re.split("[:_]", path)[-1], help=about, params=[*params, *_EVERYWHERE])
        self._path, self._checks = path, checks

    def get_short_help_str(self, limit: int = 45) -> str:
        return super().get_short_help_str(sys.maxsize)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[Any]] = {}
        for param in self.get_params(ctx):
            sections.setdefault(getattr(param, "section", "Options"), []).append(param.get_help_record(ctx))
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)

    def invoke(self, ctx: click.Context) -> Any:
        args = SimpleNamespace(**ctx.params)
        for error in filter(None, (check(args) for check in self._checks)):
            ctx.fail(error)
        return ctx.obj(self._path, args)


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the table, not of the alphabet."""
        return list(self.commands)


# What makes up the table


def option(words: str, about: str, kind: Any = None, **how: Any) -> _Option:
    """An option such as ``--seed N``, or, without a value, a flag.

    :param words: its names as click takes them, and what stands for its value.
    :param kind: its type; or the words to choose from.
    """
    *names, last = words.split()
    if last.isupper():
        how["metavar"] = last
        kind = kind or {"FILE": click.Path(), "DIR": click.Path()}.get(last)
    else:
        names.append(last)
        how.setdefault("is_flag", kind is None)
    return _Option(names, help=about, type=click.Choice(kind) if isinstance(kind, tuple) else kind, **how)


def repeated(words: str, about: str, kind: Any = None) -> _Option:
    """An option whose values are collected."""
    return option(words, f"{about}; may be repeated", kind, multiple=True)


def section(title: str, *options: _Option) -> tuple[_Option, ...]:
    """Options that belong together."""
    for each in options:
        each.section = title
    return options


def written(pattern: str, rule: str, convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Converts a text that is written as the rule says."""

    def check(text: str) -> Any:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise click.BadParameter(f"{rule}, not {text!r}")

        return convert(text)

    return check


# Checks of options that depend on each other: each returns an error, or None


def one_of(*names: str) -> Check:
    """Exactly one of them is needed."""

    def check(args: SimpleNamespace) -> str | None:
        values = {name: getattr(args, name.lstrip("-").lower()) for name in names}
        given = [name for name, value in values.items() if value not in (None, ()) and value is not False]
        excess = f"{' and '.join(given)} exclude each other"
        return None if len(given) == 1 else excess if given else f"{' or '.join(names)} is required"

    return check


def has_tokenize_fn(args: SimpleNamespace) -> bool:
    """Whether the options say how rows are tokenized."""
    return args.tokenizer is not None or args.tokenize_fn is not None


def needs_tokens(args: SimpleNamespace) -> str | None:
    """The options must say how rows are tokenized, unless each part of a mixture may say so."""
    is_known = has_tokenize_fn(args) or getattr(args, "mix", None) is not None
    return None if is_known else "--tokenizer DIR or --tokenize-fn PATH is required"


def names_one_function(args: SimpleNamespace) -> str | None:
    """``--kind`` and ``--tokenize-fn`` each choose a tokenize function."""
    if args.kind is None or args.tokenize_fn is None:
        return None

    return "--kind chooses a tokenize function; leave it, or --tokenize-fn"


def overwrites_nothing(args: SimpleNamespace) -> str | None:
    """Only a run that resumes may write to a file that exists."""
    if args.resume:
        return None if args.snapshot is not None else "--resume needs --snapshot FILE to continue from"

    old = next((path for path in (args.snapshot, args.record) if path is not None and os.path.exists(path)), None)
    return old and f"{old} is there already: add --resume to continue from there, or name another file"


def uses_the_snapshot(args: SimpleNamespace) -> str | None:
    """A snapshot is no help where no row before the sample is tokenized."""
    if args.snapshot is None or (args.position is None and needs_tokens(args) is None):
        return None

    return "--snapshot is for --ordinal or --step with --tokenizer; it does nothing else"


def needs_a_batch_size(args: SimpleNamespace) -> str | None:
    """Which rows a step has depends on it."""
    return "--step needs --batch-size N" if args.step is not None and args.batch_size is None else None


# The table

_FROM_0, _FROM_1 = _Integer(0), _Integer(1)
_SECONDS = written(r"\d+\.?\d*|\.\d+", "a number of seconds is needed", float)
_POSITION = written(r"\d+:\d+:\d+", "a position is written EPOCH:WINDOW:ROW, as in 0:3:128")
_NAME_VALUE = written(
    r"[^\W\d]\w*=.*", "a setting is written NAME=VALUE, as in overlong=truncate_left", lambda text: text.split("=", 1)
)
_AS = "as JSON or text"
_BAD_ROWS = ("raise", "skip", "quarantine")
_KINDS = ("prompt", "chat", "text", "preference", "babilong")
_TRAINED = ("assistant", "last_assistant")
_DIGESTS = ("positions", "tokens")
_PROGRESS = ("auto", "bar", "plain", "json", "none")
_CHANGES = ("data", "tokenizer", "template", "tokenize_fn", "seed", "order")

_EVERYWHERE = (
    option("--json", "print JSON to stdout"),
    option("--verbose", "log every event to stderr, not only warnings"),
)
_DATA_OR_MIX = (
    _Argument("data", "JSONL or Parquet files, globs, or folders of them", nargs=-1),
    option("--mix FILE", "a mixture of data sets, in place of DATA: a TOML, YAML or JSON file"),
)
_TOKENS = section(
    "Tokens",
    option("--tokenizer DIR", "a folder with tokenizer.json, or a Hugging Face name"),
    option("--tokenize-fn PATH", "package.module:name of any other tokenize function, or of its class"),
    option("--kind", "what the rows are (by the keys of the first row)", _KINDS),
    option("--prompt-key KEY", "key of a row's prompt (input)"),
    option("--label-key KEY", "key of its label"),
    option("--metadata-key KEY", "key of its metadata (metadata)"),
    option("--tool-key KEY", "key of its tools (tools)"),
    option("--apply-chat-template", "render the prompt as a chat", default=None),
    option("--chat-template FILE", "a chat template in place of the tokenizer's own"),
    option(
        "--max-length N", "longest sample, in tokens; longer ones are dropped, unless --set says otherwise", _FROM_1
    ),
    option("--train-on", "which messages of a chat are trained (assistant)", _TRAINED),
    repeated("--set settings NAME=VALUE", f"another setting of the tokenize function, {_AS}", _NAME_VALUE),
)
_ORDER = section(
    "Order (each of these changes it: pass what the run was started with)",
    option("--seed N", "seed of the order: any integer", int, default=42),
    option(
        "--shuffle",
        "shuffle the rows of windows of blocks, or all rows",
        ("windows", "full"),
        flag_value="windows",
        default="windows",
    ),
    option("--no-shuffle", "keep the rows in the order of the files"),
    option("--block-bytes N", "bytes of a block", _FROM_1, default=32 * 1024),
    option("--window-blocks N", "blocks of a shuffle window", _FROM_1, default=1024),
    repeated("--loader NAME=VALUE", f"another argument of the loader, such as plan_packs=true, {_AS}", _NAME_VALUE),
)
_WORK = section(
    "Work",
    option("--num-workers N", "worker processes; 0 for a thread (as many as needed)", _FROM_0),
    option(
        "--bad-rows", "stop at a bad row; skip and count it; or also write it to a file", _BAD_ROWS, default="raise"
    ),
    option("--max-bad-rows N", "more bad rows than this are an error", _FROM_0, default=100),
    option("--quarantine-path FILE", "file of the bad rows", default="quarantine.jsonl"),
    option("--excerpts/--no-excerpts", "quote the text of bad rows, or never", default=True),
)
_RUN = (
    option("--batch-size N", "samples per batch", _FROM_1, default=32),
    option("--num-batches N", "end after this many batches", _FROM_1),
    option("--epochs K", "end after this many epochs (1, unless --num-batches is given)", _FROM_1),
    option("--buffer-size N", "samples read ahead (as many as needed)", _FROM_1),
    option("--snapshot FILE", "write snapshots to FILE, and one at the end"),
    option("--snapshot-every N", "batches between snapshots", _FROM_1, default=100),
    option("--digest", "what the digest in snapshots covers, for asyncdata verify", _DIGESTS, default="positions"),
    option("--resume", "continue from --snapshot, if the file exists"),
    repeated("--allow-changed WHAT", f"resume though WHAT differs: {', '.join(_CHANGES)}", _CHANGES),
    option("--same-rows", "resume though files have other names, if their content is the same"),
    option("--record FILE", "append a JSON line per delivered sample: its position, location and digest"),
    option("--telemetry DIR", "record the run in DIR: samples, waits, bad rows"),
    option("--step-s S", "seconds to wait after each batch, as for a training step", _SECONDS, default="0"),
    option(
        "--progress", "progress on stderr; auto is a bar on a terminal and lines elsewhere", _PROGRESS, default="auto"
    ),
)
_ORDER_OF = (
    option("--epoch E", "the epoch", _FROM_0, default=0),
    option("--window W", "only this window (all of the epoch)", _FROM_0),
    option("--from first R", "the first row to print, counted from 0 in the window or the epoch", _FROM_0, default=0),
    option("--num N", "how many rows to print; 0 for all", _FROM_0, default=20),
    option("--lines", "print line numbers too; reads each file up to the row"),
)
_SAMPLE = (
    option("--position E:W:R", "by its position, as in 0:3:128", _POSITION),
    option("--ordinal N", "by its number in the run, from 0, across epochs (Sample.index)", _FROM_0),
    option("--step N", "all rows of batch N of the run's loops, from 0, across epochs", _FROM_0),
    option("--rank R", "for --step: the batch of this rank", _FROM_0, default=0),
    option("--world-size W", "for --step: the number of ranks", _FROM_1, default=1),
    option("--batch-size N", "for --step: samples per batch, or packs, of each rank", _FROM_1),
)
_INSPECT = (
    option("--loss-mask", "show which tokens are trained, and count them"),
    option("--num N", "the first rows of the order; 0 for all (3; with --html 200)", _FROM_0),
    repeated("--position E:W:R", "this row instead", _POSITION),
    repeated("--row FILE:LINE", "the row on this line, or with this number, instead; FILE: may be left out"),
    option("--context-tokens N", "tokens of each stretch of context to show; 0 for all", _FROM_0, default=400),
    option("--color", "auto: on a terminal", ("always", "never", "auto"), default="auto"),
    option("--html FILE", "write a page with the rows, to search and filter in a browser, in place of printing them"),
)
_REPORT = (
    _Argument("folder", "the folder of the run's telemetry", required=False),
    option("--demo", "record a short run of data that every Python has, in place of FOLDER"),
    option("-o --output FILE", "the report", default="report.html"),
    option(
        "--serve", "show the report in the browser while the run goes on, in place of writing a file; Ctrl-C ends it"
    ),
    option(
        "--port N",
        "for --serve: the port on 127.0.0.1; no other machine can reach it (any that is free)",
        _Integer(0, 65535),
        default=0,
    ),
    option("--samples N", "at most this many samples in the report", _FROM_0, default=1000),
)
_DEMO = (
    option("--keep DIR", "keep data, snapshot and records in DIR"),
    option("--rows N", "at most this many rows", _Integer(500), default=5000),
    option("--num-workers N", "worker processes of the first run", _FROM_1),
    option("--telemetry DIR", "record the killed run and the resumed one in DIR, for `asyncdata report DIR`"),
)
_PROVE = (
    option("--backend", "only this one; it must be installed", ("gigatoken", "fastokens")),
    option("--all", "try all characters of Unicode: a minute for each backend, on one core"),
    option("--again", "test again, also what an audit revoked"),
)
_TOKENIZER = _Argument("tokenizer", "a folder with tokenizer.json, or a Hugging Face name")

_ONE_SOURCE = one_of("DATA", "--mix")
_SNAPSHOT = [
    _Command(
        "files:snapshot_show",
        "Print what a snapshot contains, after checking that it is undamaged.",
        _Argument("file", "the snapshot"),
    )
]
_QUARANTINE = [
    _Command(
        "files:quarantine_show",
        "Print which rows are in a quarantine file, and what is wrong with them.",
        _Argument("file", "the quarantine file"),
    )
]
_TOKENIZERS = [
    _Command(
        "machine:tokenizer_prove",
        "Test whether the installed fast backends give the same ids as tokenizers, and store the result. Latin text "
        "and the special tokens are tried, in a second for each; other characters are tried as a run meets them. A "
        "stored result is shown, unless --all or --again is given.",
        *(_TOKENIZER, *_PROVE),
    ),
    _Command("machine:tokenizer_show", "Show the stored results for a tokenizer.", _TOKENIZER),
]
_COMMANDS = [
    _Command(
        "run:demo",
        "Kill a run with SIGKILL, resume it, and prove that nothing was lost, repeated or reordered. The data are "
        "questions about the docstrings of this Python's standard library, the tokenizer comes with asyncdata; nothing "
        "is downloaded. Exit status 1 if the two sequences differ.",
        *_DEMO,
    ),
    _Command(
        "run:run",
        "Stream data as a trainer would, with snapshots and resume, and say how fast it was. Ends after --epochs or "
        "--num-batches, whichever comes first; batches before a resume count.",
        *(*_DATA_OR_MIX, *_TOKENS, *_ORDER, *_WORK, *_RUN),
        checks=(_ONE_SOURCE, overwrites_nothing, needs_tokens, names_one_function),
    ),
    _Command(
        "inspect:order",
        "Print positions of the order D: which row comes when. Nothing is tokenized, unless the order depends on "
        "samples; the windows that are printed are read. One line a row, tab-separated: position (epoch:window:row), "
        "path, byte offset, length in bytes. With --json, one object a line. With --mix, a column has the name of the "
        "part, and rows are tokenized if --tokenizer or --tokenize-fn is given; otherwise every row counts as a "
        "sample.",
        *(*_DATA_OR_MIX, *_TOKENS, *_ORDER, *_ORDER_OF),
        checks=(_ONE_SOURCE, names_one_function),
    ),
    _Command(
        "inspect:sample",
        "Print one row: its file, line and byte offset, the raw row, and its tokens if a tokenizer is given. "
        "--position reads one window. --ordinal without --tokenizer counts every row as a sample, and reads all "
        "windows before it. --ordinal with --tokenizer does not count rows that the run dropped: it tokenizes all rows "
        "before it, in worker processes, which takes as long as the run took; a --snapshot of the run shortens this. "
        "--step delivers all batches before it in the same way, and prints one line a row; packs need --tokenizer, and "
        "their settings as --loader packing=.... With --mix, all samples before it are delivered, for --position too.",
        *(*_DATA_OR_MIX, *_SAMPLE, *_TOKENS, *_ORDER, *_WORK),
        option("--snapshot FILE", "begin at this snapshot of the run; --step then counts the batches after it"),
        checks=(
            _ONE_SOURCE,
            one_of("--position", "--ordinal", "--step"),
            names_one_function,
            uses_the_snapshot,
            needs_a_batch_size,
        ),
    ),
    _Command(
        "inspect:inspect",
        "Print the tokens of some rows as text, and with --loss-mask which of them are trained. Trained text is "
        "coloured on a terminal and stands in ⟦ ⟧ elsewhere, the rest is context; in ⟨ ⟩ are special tokens, and "
        "characters that cannot be shown. For a row that yields no sample, the reason is printed. With --json, one "
        "object a row and one for the total. With --mix, the rows are those of the first samples of the mixture, with "
        "the name of the part.",
        *(*_DATA_OR_MIX, *_INSPECT, *_TOKENS, *_ORDER),
        checks=(_ONE_SOURCE, needs_tokens, names_one_function),
    ),
    _Command(
        "report:report",
        "Write the report of a run, from its telemetry: waits, drops, samples, lengths, the mix. It is one HTML "
        "file that loads nothing: a browser opens it from its file, also without a network. With --serve, the page is "
        "on this machine's own address, and renews itself while the run goes on.",
        *_REPORT,
        checks=(one_of("FOLDER", "--demo"),),
    ),
    _Command(
        "machine:doctor",
        "Say what this machine has for a run, and whether it works. That is Python, packages, CPUs, memory, limits, "
        "the cache folder, the start of workers, and reading DATA. Paste its output into an issue. Exit status 1 if "
        "something fails.",
        _Argument("data", "files, folders or addresses to look at", nargs=-1),
    ),
    _Group("snapshot", _SNAPSHOT, help="Show what a snapshot contains."),
    _Command(
        "files:verify",
        "Say whether two runs saw the same stream, by the digests in their snapshots. Exit status: 0 if they did, up "
        "to the same position; 3 if not; 4 if the digests cannot tell, for example because one run is ahead of the "
        "other.",
        *(_Argument("first", "a snapshot of one run"), _Argument("second", "a snapshot of the other run")),
    ),
    _Group("quarantine", _QUARANTINE, help="List the bad rows that a run skipped."),
    _Group("tokenizer", _TOKENIZERS, help="Prove fast tokenizer backends exact."),
]
_EPILOG = """
\b
Exit status:
  0    done
  1    the library refused, or failed: one message says what, where, and how to continue
  2    the command line is wrong
  130  interrupted by Ctrl-C

Data goes to stdout, everything else to stderr. With --json data is JSON, and so is an error: {"error": {...}}.
Colours obey NO_COLOR; without a terminal there are none.
"""

commands = _Group(
    "asyncdata",
    _COMMANDS,
    help="An async, exactly resumable prefetching data loader for LLM post-training.",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120, "show_default": True},
)
click.version_option(__version__, message="%(prog)s %(version)s")(commands)


# Messages of the library, in the words of the command line

BAD_ROWS = {"policy": "bad_rows", "max": "max_bad_rows", "path": "quarantine_path", "excerpts": "excerpts"}
"""Settings of ``BadRows``, and the options that set them, by their names in Python."""
_OF_BAD_ROWS = re.compile(r"BadRows\((?P<setting>\w+)=(?P<value>[^()]+)\)")

_SETTING = re.compile(
    r"""(?<![\w.-])(?P<name>[a-z]\w*)=(?:(?P<items>\{[^{}]*\}|\[[^\[\]]*\])|(?P<text>"[^"]*"|'[^']*')|(?P<word>[\w.:/-]*\w))"""
)
_BARE = re.compile(r"[\w.:/-]+")


def as_options(message: str, names: Collection[str]) -> str:
    """The message with each ``name=value`` as ``--name value``, where the command has that option.

    A set or a list is the option once for each of its values; True, the option alone.

    :param names: the options of the command, by their names in Python.
    """

    def option(match: re.Match[str]) -> str:
        name, items, text, word = match.group("name", "items", "text", "word")
        if name not in names or word in ("None", "False"):
            return match[0]

        told = "--" + name.replace("_", "-")
        if items:
            return " ".join(f"{told} {item.strip().strip(_QUOTES)}" for item in items[1:-1].split(","))

        value = word if text is None else text[1:-1]
        return told if value == "True" else f"{told} {value if _BARE.fullmatch(value) else json.dumps(value)}"

    def single(match: re.Match[str]) -> str:
        name = BAD_ROWS.get(match["setting"])
        return f"{name}={match['value']}" if name in names and match["value"] != "False" else match[0]

    return _SETTING.sub(option, _OF_BAD_ROWS.sub(single, message))


_QUOTES = "\"'"


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
            return int(resolve_path(f"asyncdata.cli.{path}")(args, output))
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
