"""The command line as one table: every command, its options, their checks, and what the help says of them.

argparse is set up from the table, and a test compares the table with docs/reference/cli.md. Nothing of the library is
imported here, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.cli.output import writing_stdout
from asyncdata.core.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    Check = Callable[[argparse.Namespace], str | None]
    Add = Callable[[Any], object]

__all__ = ("BAD_ROWS", "as_options", "has_tokenize_fn", "make_parser")


# What makes up the table: functions that add an option, or several, to a parser


def option(words: str, about: str, kind: Any = None, default: Any = None, **how: Any) -> Add:
    """An option, such as ``--seed N``, or an argument, such as ``DATA``. One without a value is a flag.

    :param kind: converts its text; or the words to choose from.
    :param default: is in the help, too.
    :param how: further keywords of ``add_argument``.
    """
    *names, metavar = words.split(" ")
    if metavar.startswith("-"):
        names.append(metavar)
        if kind is None:
            how.setdefault("action", "store_true")
    else:
        names, how["metavar"] = names or [how.pop("dest", metavar.lower())], metavar
    if kind is not None:
        how["choices" if isinstance(kind, tuple) else "type"] = kind
    if default is not None:
        about, how["default"] = f"{about} (%(default)s)", default
    elif how.get("action") == "append" or how.get("nargs") == "*":
        how["default"] = []
    return lambda parser: parser.add_argument(*names, help=about, **how)


def repeated(words: str, about: str, kind: Any = None, **how: Any) -> Add:
    """An option whose values are collected in a list."""
    return option(words, f"{about}; may be repeated", kind, action="append", **how)


def group(title: str, about: str | None, *options: Add) -> Add:
    """Options that belong together."""
    return _within(lambda parser: parser.add_argument_group(title, about), options)


def one_of(*options: Add) -> Add:
    """Options of which exactly one is needed."""
    return _within(lambda parser: parser.add_mutually_exclusive_group(required=True), options)


def _within(part_of: Callable[[Any], Any], options: Iterable[Add]) -> Add:
    def add(parser: Any) -> None:
        part = part_of(parser)
        for each in options:
            each(part)

    return add


# The types of their values


def whole(least: int) -> Callable[[str], int]:
    """Converts to a whole number of at least ``least``."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number from {least} on is needed, not {text!r}")

        return int(text)

    return convert


def written(pattern: str, rule: str, convert: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """Converts a text that is written as the rule says."""

    def check(text: str) -> Any:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise argparse.ArgumentTypeError(f"{rule}, not {text!r}")

        return convert(text)

    return check


# Checks of options that depend on each other: each returns an error, or None


def has_tokenize_fn(args: argparse.Namespace) -> bool:
    """Whether the options say how rows are tokenized."""
    return args.tokenizer is not None or args.tokenize_fn is not None


def needs_tokens(args: argparse.Namespace) -> str | None:
    """The options must say how rows are tokenized, unless each part of a mixture may say so."""
    is_known = has_tokenize_fn(args) or getattr(args, "mix", None) is not None
    return None if is_known else "--tokenizer DIR or --tokenize-fn PATH is required"


def names_one_function(args: argparse.Namespace) -> str | None:
    """``--kind`` and ``--tokenize-fn`` each choose a tokenize function."""
    if args.kind is None or args.tokenize_fn is None:
        return None

    return "--kind chooses a tokenize function; leave it, or --tokenize-fn"


def overwrites_nothing(args: argparse.Namespace) -> str | None:
    """Only a run that resumes may write to a file that exists."""
    if args.resume:
        return None if args.snapshot is not None else "--resume needs --snapshot FILE to continue from"

    old = next((path for path in (args.snapshot, args.record) if path is not None and os.path.exists(path)), None)
    return old and f"{old} is there already: add --resume to continue from there, or name another file"


def uses_the_snapshot(args: argparse.Namespace) -> str | None:
    """A snapshot is no help where no row before the sample is tokenized."""
    if args.snapshot is None or (args.ordinal is not None and needs_tokens(args) is None):
        return None

    return "--snapshot is for --ordinal with --tokenizer; it does nothing else"


class _Command(NamedTuple):
    """A command: what it does, more about that, its arguments, and what is checked once they are read."""

    about: str
    more: str
    arguments: tuple[Add, ...]
    checks: tuple[Check, ...] = ()


# The table

_FROM_0, _FROM_1 = whole(0), whole(1)
_SECONDS = written(r"\d+\.?\d*|\.\d+", "a number of seconds is needed", float)
_POSITION = written(r"\d+:\d+:\d+", "a position is written EPOCH:WINDOW:ROW, as in 0:3:128")
_NAME_VALUE = written(
    r"[^\W\d]\w*=.*", "a setting is written NAME=VALUE, as in overlong=truncate_left", lambda text: text.split("=", 1)
)
_AS = "as JSON or text"
_BAD_ROWS = ("raise", "skip", "quarantine")
_KINDS = ("prompt", "chat", "text", "preference", "babilong")
_TRAINED = ("assistant", "last_assistant", "loss")
_CHANGES = ("data", "tokenizer", "template", "tokenize_fn", "seed", "order")

_EVERYWHERE = (
    option("--json", "print JSON to stdout"),
    option("--verbose", "log every event to stderr, not only warnings"),
)
_DATA_OR_MIX = one_of(
    option("DATA", "JSONL or Parquet files, globs, or folders of them", nargs="*"),
    option("--mix FILE", "a mixture of data sets, in place of DATA: a TOML, YAML or JSON file"),
)
_TOKENS = group(
    "tokens",
    None,
    option("--tokenizer DIR", "a folder with tokenizer.json, or a Hugging Face name"),
    option("--tokenize-fn PATH", "package.module:name of any other tokenize function, or of its class"),
    option("--kind", "what the rows are (by the keys of the first row)", _KINDS),
    option("--prompt-key KEY", "key of a row's prompt (input)"),
    option("--label-key KEY", "key of its label"),
    option("--metadata-key KEY", "key of its metadata (metadata)"),
    option("--tool-key KEY", "key of its tools (tools)"),
    option("--apply-chat-template", "render the prompt as a chat", action="store_const", const=True),
    option("--chat-template FILE", "a chat template in place of the tokenizer's own"),
    option(
        "--max-length N", "longest sample, in tokens; longer ones are dropped, unless --set says otherwise", _FROM_1
    ),
    option("--train-on", "which messages of a chat are trained (assistant)", _TRAINED),
    repeated("--set NAME=VALUE", f"another setting of the tokenize function, {_AS}", _NAME_VALUE, dest="settings"),
)
_ORDER = group(
    "order",
    "Each of these changes the order: pass what the run was started with.",
    option("--seed N", "seed of the order: any integer", int, 42),
    option(
        "--shuffle",
        "shuffle the rows of windows of blocks, or all rows",
        ("windows", "full"),
        "windows",
        nargs="?",
        const="windows",
    ),
    option(
        "--no-shuffle",
        "keep the rows in the order of the files",
        dest="shuffle",
        action="store_const",
        const="none",
    ),
    option("--block-bytes N", "bytes of a block", _FROM_1, 32 * 1024),
    option("--window-blocks N", "blocks of a shuffle window", _FROM_1, 1024),
    repeated("--loader NAME=VALUE", f"another argument of the loader, such as plan_packs=true, {_AS}", _NAME_VALUE),
)
_WORK = group(
    "work",
    None,
    option("--num-workers N", "worker processes; 0 for a thread (as many as needed)", _FROM_0),
    option("--bad-rows", "stop at a bad row; skip and count it; or also write it to a file", _BAD_ROWS, "raise"),
    option("--max-bad-rows N", "more bad rows than this are an error", _FROM_0, 100),
    option("--quarantine-path FILE", "file of the bad rows", default="quarantine.jsonl"),
    option("--no-excerpts", "never quote the text of bad rows", dest="excerpts", action="store_false"),
)
_RUN = (
    option("--batch-size N", "samples per batch", _FROM_1, 32),
    option("--num-batches N", "end after this many batches", _FROM_1),
    option("--epochs K", "end after this many epochs (1, unless --num-batches is given)", _FROM_1),
    option("--buffer-size N", "samples read ahead (as many as needed)", _FROM_1),
    option("--snapshot FILE", "write snapshots to FILE, and one at the end"),
    option("--snapshot-every N", "batches between snapshots", _FROM_1, 100),
    option(
        "--digest", "what the digest in snapshots covers, for asyncdata verify", ("positions", "tokens"), "positions"
    ),
    option("--resume", "continue from --snapshot, if the file exists"),
    repeated("--allow-changed WHAT", f"resume though WHAT differs: {', '.join(_CHANGES)}", _CHANGES),
    option("--same-rows", "resume though files have other names, if their content is the same"),
    option("--record FILE", "append a JSON line per delivered sample: its position, location and digest"),
    option("--telemetry DIR", "record the run in DIR: samples, waits, bad rows"),
    option("--trace FILE", "write spans of workers, windows and waits to FILE, for the Perfetto UI"),
    option("--step-s S", "seconds to wait after each batch, as for a training step", _SECONDS, 0.0),
    option(
        "--progress",
        "progress on stderr; auto is a bar on a terminal and lines elsewhere",
        ("auto", "bar", "plain", "json", "none"),
        "auto",
    ),
)
_ORDER_OF = (
    option("--epoch E", "the epoch", _FROM_0, 0),
    option("--window W", "only this window (all of the epoch)", _FROM_0),
    option("--from R", "the first row to print, counted from 0 in the window or the epoch", _FROM_0, 0, dest="first"),
    option("--num N", "how many rows to print; 0 for all", _FROM_0, 20),
    option("--lines", "print line numbers too; reads each file up to the row"),
)
_SAMPLE = one_of(
    option("--position E:W:R", "by its position, as in 0:3:128", _POSITION),
    option("--ordinal N", "by its number in the run, from 0, across epochs (Sample.index)", _FROM_0),
)
_INSPECT = (
    option("--loss-mask", "show which tokens are trained, and count them"),
    option("--num N", "the first rows of the order; 0 for all (3; with --html 200)", _FROM_0),
    option("--position E:W:R", "this row instead; may be repeated", _POSITION, action="append"),
    repeated("--row FILE:LINE", "the row on this line, or with this number, instead; FILE: may be left out"),
    option("--context-tokens N", "show at most this many tokens of each stretch of context; 0 for all", _FROM_0, 400),
    option("--color", "auto: on a terminal", ("always", "never", "auto"), "auto"),
    option("--html FILE", "write a page with the rows, to search and filter in a browser, in place of printing them"),
)
_REPORT = (
    one_of(
        option("FOLDER", "the folder of the run's telemetry", nargs="?"),
        option("--demo", "record a short run of data that every Python has, in place of FOLDER"),
    ),
    option("-o --output FILE", "the page", default="report.html"),
    option("--samples N", "at most this many samples on the page", _FROM_0, 1000),
)
_DEMO = (
    option("--keep DIR", "keep data, snapshot and records in DIR"),
    option("--rows N", "at most this many rows", whole(500), 5000),
    option("--num-workers N", "worker processes of the first run", _FROM_1),
    option("--telemetry DIR", "record the killed run and the resumed one in DIR, for `asyncdata report DIR`"),
)
_KEYS = option("KEY", "the first characters of its key, as ls prints it", nargs="*")
_CACHES = (
    option("--dir DIR", "the folder of the caches, if `Cache(tokens=...)` names one"),
    option("--row-index", "row indexes in place of token caches; DIR is then `index` in the folder of `Cache`"),
)
_QUARANTINE = option("FILE", "the quarantine file")
_PROVE = (
    option("--backend", "only this one; it must be installed", ("gigatoken", "fastokens")),
    option("--all", "try all characters of Unicode: a minute for each backend, on one core"),
    option("--again", "test again, also what an audit revoked"),
)
_TOKENIZER = option("DIR", "a folder with tokenizer.json, or a Hugging Face name", dest="tokenizer")
_TWO = (
    option("FILE", "a snapshot of one run", dest="first"),
    option("FILE", "a snapshot of the other run", dest="second"),
)

_GROUPS = {
    "snapshot": "show what a snapshot contains",
    "cache": "list, check and remove token caches and row indexes",
    "quarantine": "list the bad rows that a run skipped",
    "tokenizer": "prove fast tokenizer backends exact",
}
"""Words that several commands begin with."""

_MODULES = {"sample": "order", "snapshot": "files", "verify": "files", "quarantine": "files"}
"""The first word of a command -> the module that has it, if it is called otherwise."""

_COMMANDS = {
    "demo": _Command(
        "kill a run with SIGKILL, resume it, and prove that nothing was lost, repeated or reordered",
        "The data are questions about the docstrings of this Python's standard library, the tokenizer comes with "
        "asyncdata; nothing is downloaded. Exit status 1 if the two sequences differ.",
        _DEMO,
    ),
    "run": _Command(
        "stream data as a trainer would, with snapshots and resume, and say how fast it was",
        "Ends after --epochs or --num-batches, whichever comes first; batches before a resume count.",
        (_DATA_OR_MIX, _TOKENS, _ORDER, _WORK, *_RUN),
        (overwrites_nothing, needs_tokens, names_one_function),
    ),
    "order": _Command(
        "print positions of the order D: which row comes when",
        "Nothing is tokenized, unless the order depends on samples; the windows that are printed are read. One line a "
        "row, tab-separated: position (epoch:window:row), path, byte offset, length in bytes. With --json, one object "
        "a line. With --mix, a column has the name of the part, and rows are tokenized if --tokenizer or --tokenize-fn "
        "is given; otherwise every row counts as a sample.",
        (_DATA_OR_MIX, _TOKENS, _ORDER, *_ORDER_OF),
        (names_one_function,),
    ),
    "sample": _Command(
        "print one row: its file, line and byte offset, the raw row, and its tokens if a tokenizer is given",
        "--position reads one window. --ordinal without --tokenizer counts every row as a sample, and reads all "
        "windows before it. --ordinal with --tokenizer does not count rows that the run dropped: it tokenizes all rows "
        "before it, in worker processes, which takes as long as the run took; a --snapshot of the run shortens this. "
        "With --mix, all samples before it are delivered, for --position too.",
        (
            _DATA_OR_MIX,
            _SAMPLE,
            _TOKENS,
            _ORDER,
            _WORK,
            option("--snapshot FILE", "for --ordinal: begin to count at this snapshot of the run"),
        ),
        (names_one_function, uses_the_snapshot),
    ),
    "inspect": _Command(
        "print the tokens of some rows as text, and with --loss-mask which of them are trained",
        "Trained text is coloured on a terminal and stands in ⟦ ⟧ elsewhere, the rest is context; in ⟨ ⟩ are special "
        "tokens, and characters that cannot be shown. For a row that yields no sample, the reason is printed. With "
        "--json, one object a row and one for the total. With --mix, the rows are those of the first samples of the "
        "mixture, with the name of the part.",
        (_DATA_OR_MIX, *_INSPECT, _TOKENS, _ORDER),
        (needs_tokens, names_one_function),
    ),
    "report": _Command(
        "write one page about a run, from its telemetry: samples, waits, lengths, drops, the mix",
        "The page is one HTML file that loads nothing: a browser opens it from its file, also without a network.",
        _REPORT,
    ),
    "snapshot show": _Command(
        "print what a snapshot contains, after checking that it is undamaged",
        "",
        (option("FILE", "the snapshot"),),
    ),
    "verify": _Command(
        "say whether two runs saw the same stream, by the digests in their snapshots",
        "Exit status: 0 if they did, up to the same position; 3 if not; 4 if the digests cannot tell, for example "
        "because one run is ahead of the other.",
        _TWO,
    ),
    "cache ls": _Command("list token caches, or row indexes, the most recently used last", "", _CACHES),
    "cache verify": _Command(
        "read token caches, and compare them with their checksums",
        "Exit status 1 if a segment is damaged. A run that finds one tokenizes its rows again.",
        (_CACHES[0], _KEYS),
    ),
    "cache rm": _Command(
        "remove token caches, or row indexes",
        "One that a run is using is refused.",
        (*_CACHES, _KEYS, option("--all", "all of them")),
    ),
    "quarantine show": _Command(
        "print which rows are in a quarantine file, and what is wrong with them",
        "",
        (_QUARANTINE,),
    ),
    "tokenizer prove": _Command(
        "test whether the installed fast backends give the same ids as tokenizers, and store the result",
        "ASCII and the special tokens are tried, in a second for each; other characters are tried as a run meets them. "
        "A stored result is shown, unless --all or --again is given.",
        (*_PROVE, _TOKENIZER),
    ),
    "tokenizer show": _Command("show the stored results for a tokenizer", "", (_TOKENIZER,)),
}
_EPILOG = """\
exit status:
  0    done
  1    the library refused, or failed: one message says what, where, and how to continue
  2    the command line is wrong
  130  interrupted by Ctrl-C

Data goes to stdout, everything else to stderr. With --json data is JSON, and so is an error: {"error": {...}}.
Colours obey NO_COLOR; without a terminal there are none.
"""


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        """As argparse does, but a stdout that cannot be written is an error."""
        if file is not sys.stdout:
            super()._print_message(message, file)
            return

        with writing_stdout():
            file.write(message)
            file.flush()


def make_parser() -> argparse.ArgumentParser:
    """The whole command line.

    ``run`` of parsed arguments names the function of the command, ``module:name`` in ``asyncdata.cli.commands``;
    ``checks`` are functions of the parsed arguments, each of which returns an error or None.
    """
    parser = _Parser(
        prog="asyncdata",
        description="An async, exactly resumable prefetching data loader for LLM post-training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"asyncdata {__version__}")
    kinds: dict[str, Any] = {"title": "commands", "metavar": "COMMAND", "required": True}
    parents: dict[str, Any] = {"": parser.add_subparsers(**kinds)}
    for words, command in _COMMANDS.items():
        family, _, name = words.rpartition(" ")
        if family not in parents:
            parents[family] = _added(parents[""], family, _GROUPS[family]).add_subparsers(**kinds)
        child = _added(parents[family], name, command.about, command.more)
        first, function = family or name, words.replace(" ", "_")
        child.set_defaults(run=f"{_MODULES.get(first, first)}:{function}", checks=command.checks)
        for add in (*_EVERYWHERE, *command.arguments):
            add(child)
    return parser


def _added(parents: Any, name: str, about: str, more: str = "") -> argparse.ArgumentParser:
    description = f"{about[0].upper()}{about[1:]}. {more}".rstrip()
    parser: argparse.ArgumentParser = parents.add_parser(name, help=about, description=description, allow_abbrev=False)
    return parser


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
