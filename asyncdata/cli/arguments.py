"""The command line as one table: every command, every option, and what the help and the reference say of it.

argparse is set up from the table, and a test compares the table with docs/reference/cli.md. Nothing of the library is
imported here, so that ``--help`` is quick.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdata.cli.standard_streams import writing_stdout
from asyncdata.core.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ("make_parser",)


def _whole(least: int) -> Callable[[str], int]:
    """Converts to a whole number of at least ``least``."""

    def convert(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"a whole number from {least} on is needed, not {text!r}")

        return int(text)

    return convert


def _seconds(text: str) -> float:
    if not re.fullmatch(r"\d+\.?\d*|\.\d+", text):
        raise argparse.ArgumentTypeError(f"a number of seconds is needed, not {text!r}")

    return float(text)


def _position(text: str) -> str:
    if not re.fullmatch(r"\d+:\d+:\d+", text):
        raise argparse.ArgumentTypeError(f"a position is written EPOCH:WINDOW:ROW, as in 0:3:128, not {text!r}")

    return text


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (sign and name.isidentifier()):
        raise argparse.ArgumentTypeError(f"a setting is written NAME=VALUE, as in overlong=truncate_left, not {text!r}")

    return name, value


class _Option(NamedTuple):
    """An argument of a command.

    :ivar words: as in the help: ``--seed N``, or ``DATA`` for one without a name.
    :ivar about: what it is; its default is added.
    :ivar kind: converts its text; or the words to choose from; or ``_FLAG``.
    :ivar how: what else argparse is told.
    """

    words: str
    about: str
    kind: Any
    default: Any
    how: dict[str, Any]


def _o(words: str, about: str, kind: Any = None, default: Any = None, **how: Any) -> _Option:
    return _Option(words, about, kind, default, how)


class _Group(NamedTuple):
    """Arguments that belong together. Of those of a group without a title, exactly one is needed."""

    title: str
    about: str | None
    options: tuple[_Option, ...]


class _Command(NamedTuple):
    """A command: what it does, more about that, and its arguments."""

    about: str
    more: str
    arguments: tuple[_Option | _Group, ...]


_FLAG: dict[str, Any] = {"action": "store_true"}
_MANY: dict[str, Any] = {"action": "append", "default": []}
_FROM_0, _FROM_1 = _whole(0), _whole(1)
_AS = "as JSON or text; may be repeated"
_BAD_ROWS = ("raise", "skip", "quarantine")
_PROGRESS = ("auto", "bar", "plain", "json", "none")
_CHANGES = ("data", "tokenizer", "template", "tokenize_fn", "seed", "order")

_EVERYWHERE = (
    _o("--json", "print JSON to stdout", _FLAG),
    _o("--verbose", "log every event to stderr, not only warnings", _FLAG),
)
_DATA = _o("DATA", "JSONL or Parquet files, globs, or folders of them", nargs="+")


def _tokens(kind: str = "by the keys of the first row") -> _Group:
    """How rows become tokens. An option that is not given leaves the default of the tokenize function's class."""
    options = (
        _o("--tokenizer DIR", "a folder with tokenizer.json, or a Hugging Face name"),
        _o("--tokenize-fn PATH", "package.module:name of any other tokenize function, or of its class"),
        _o("--kind", f"what the rows are ({kind})", ("prompt", "chat", "text", "preference", "babilong")),
        _o("--prompt-key KEY", "where a row has its prompt (input)"),
        _o("--label-key KEY", "where a row has its label"),
        _o("--metadata-key KEY", "where it has metadata (metadata)"),
        _o("--tool-key KEY", "where it has tools (tools)"),
        _o("--apply-chat-template", "render the prompt as a chat", action="store_const", const=True),
        _o("--chat-template FILE", "a chat template in place of the tokenizer's own"),
        _o("--max-length N", "the most tokens of a sample; --set says what is done to longer ones (dropped)", _FROM_1),
        _o("--train-on", "which messages of a chat are trained (assistant)", ("assistant", "last_assistant", "loss")),
        _o("--set NAME=VALUE", f"another setting of the tokenize function, {_AS}", _setting, dest="settings", **_MANY),
    )
    return _Group("tokens", None, options)


_ORDER = _Group(
    "order",
    "Each of these makes another order; give what the run was given.",
    (
        _o("--seed N", "any integer", int, 42),
        _o(
            "--shuffle",
            "mix the rows of windows of blocks, or all rows",
            ("windows", "full"),
            "windows",
            nargs="?",
            const="windows",
        ),
        _o("--no-shuffle", "leave the rows in their order", dest="shuffle", action="store_const", const="none"),
        _o("--block-bytes N", "size of a block", _FROM_1, 32 * 1024),
        _o("--window-blocks N", "blocks that are mixed together", _FROM_1, 1024),
        _o("--loader NAME=VALUE", f"another argument of the loader, such as plan_packs=true, {_AS}", _setting, **_MANY),
    ),
)
_WORK = _Group(
    "work",
    None,
    (
        _o("--num-workers N", "worker processes; 0 for a thread (as many as needed)", _FROM_0),
        _o("--bad-rows", "stop at a bad row, count it, or count it and write it down", _BAD_ROWS, "raise"),
        _o("--max-bad-rows N", "more of them are an error", _FROM_0, 100),
        _o("--quarantine-path FILE", "where they are written", default="quarantine.jsonl"),
        _o("--no-excerpts", "leave out the text of bad rows everywhere", dest="excerpts", action="store_false"),
    ),
)
_RUN = (
    _o("--batch-size N", "samples per batch", _FROM_1, 32),
    _o("--num-batches N", "end after this many batches", _FROM_1),
    _o("--epochs K", "end after this many epochs (1, unless --num-batches is given)", _FROM_1),
    _o("--buffer-size N", "samples read ahead (as many as needed)", _FROM_1),
    _o("--snapshot FILE", "write snapshots to FILE, and one at the end"),
    _o("--snapshot-every N", "batches between snapshots", _FROM_1, 100),
    _o("--digest", "what snapshots have a digest of, for asyncdata verify", ("positions", "tokens"), "positions"),
    _o("--resume", "continue from --snapshot, if the file exists", _FLAG),
    _o(
        "--allow-changed WHAT", f"resume though WHAT differs: {', '.join(_CHANGES)}; may be repeated", _CHANGES, **_MANY
    ),
    _o("--same-rows", "resume though files have other names, if their content is the same", _FLAG),
    _o("--record FILE", "append a JSON line per delivered sample: its position, place and digest"),
    _o("--step-s S", "wait this long after each batch, as for a training step", _seconds, 0.0),
    _o(
        "--progress",
        "shown on stderr; auto is a bar on a terminal and lines elsewhere",
        ("auto", "bar", "plain", "json", "none"),
        "auto",
    ),
)
_ORDER_OF = (
    _o("--epoch E", "the epoch", _FROM_0, 0),
    _o("--window W", "only this window; without it, all of the epoch", _FROM_0),
    _o("--from R", "the first row to print, counted from 0 in the window or the epoch", _FROM_0, 0, dest="first"),
    _o("--num N", "how many rows to print; 0 for all", _FROM_0, 20),
    _o("--lines", "print line numbers too; reads each file up to the row", _FLAG),
)
_SAMPLE = _Group(
    "",
    None,
    (
        _o("--position E:W:R", "by its position, as in 0:3:128", _position),
        _o("--ordinal N", "by its number in the run, from 0, across epochs (Sample.index)", _FROM_0),
    ),
)
_INSPECT = (
    _o("--loss-mask", "show which tokens are trained, and count them", _FLAG),
    _o("--num N", "the first rows of the order; 0 for all", _FROM_0, 3),
    _o("--position E:W:R", "this row in place of them; may be repeated", _position, action="append"),
    _o("--row FILE:LINE", "the row on this line, or of this number; FILE: may be left out; may be repeated", **_MANY),
    _o("--context-tokens N", "show at most this many tokens of context at a stretch; 0 for all", _FROM_0, 400),
    _o("--color", "auto: on a terminal", ("always", "never", "auto"), "auto"),
)
_BENCH = (
    _o("--num-workers N", "worker processes; 0 for a thread (one per CPU, at most 8)", _FROM_0),
    _o("--bad-rows", "stop at a bad row, or skip it", ("raise", "skip"), "raise"),
    _o("--buffer-size N", "samples read ahead", _FROM_1, 1000),
    _o("--seconds S", "about how long to measure", _seconds, 30.0),
)
_DEMO = (
    _o("--keep DIR", "keep data, snapshot and records in DIR"),
    _o("--rows N", "at most this many rows", _whole(500), 5000),
    _o("--num-workers N", "worker processes of the first run", _FROM_1),
)
_KEYS = _o("KEY", "the first letters of its key, as ls prints it", nargs="*")
_CACHES = (
    _o("--dir DIR", "the folder of the caches, where Cache(tokens=...) named one"),
    _o("--row-index", "row indexes in place of token caches; DIR is `index` in the folder of Cache then", _FLAG),
)
_QUARANTINE = _o("FILE", "the quarantine file")
_PROVE = (
    _o("--backend", "only this one; it must be installed", ("gigatoken", "fastokens")),
    _o("--again", "forget what is known, and what an audit revoked", _FLAG),
)
_TOKENIZER = _o("DIR", "a folder with tokenizer.json, or a Hugging Face name", dest="tokenizer")
_TWO = (_o("FILE", "a snapshot of the one", dest="first"), _o("FILE", "a snapshot of the other", dest="second"))

_GROUPS = {
    "snapshot": "look into a snapshot",
    "cache": "look after token caches and row indexes",
    "quarantine": "look after the bad rows that a run put aside",
    "tokenizer": "prove fast tokenizer backends exact",
}
"""Words that several commands begin with."""

_COMMANDS = {
    "demo": _Command(
        "kill a run with SIGKILL, resume it, and prove that nothing was lost, repeated or reordered",
        "The data are questions about the docstrings of this Python's standard library, the tokenizer is one that "
        "comes with asyncdata; nothing is downloaded. Exit status 1 if the two sequences differ.",
        _DEMO,
    ),
    "run": _Command(
        "stream data as a trainer would, with snapshots and resume, and say how fast it was",
        "Ends after --epochs or --num-batches, whichever comes first; batches before a resume count.",
        (_DATA, _tokens(), _ORDER, _WORK, *_RUN),
    ),
    "order": _Command(
        "print positions of the order D: which row comes when",
        "Nothing is tokenized, unless the order depends on samples; the windows that are printed are read. One line a "
        "row, tab-separated: position (epoch:window:row), path, byte offset, length in bytes. With --json, one object "
        "a line.",
        (_DATA, _tokens(), _ORDER, *_ORDER_OF),
    ),
    "sample": _Command(
        "print one row: its file, line and byte offset, the raw row, and its tokens if a tokenizer is given",
        "By --position it costs the read of one window. By --ordinal without --tokenizer, every row counts as a "
        "sample, and each window before it is read. By --ordinal with --tokenizer, rows that the run dropped do not "
        "count: all rows before it are tokenized, in worker processes, which takes as long as the run took; a "
        "--snapshot of the run shortens the way.",
        (_DATA, _SAMPLE, _tokens(), _ORDER, _WORK, _o("--snapshot FILE", "count --ordinal on from this snapshot")),
    ),
    "inspect": _Command(
        "print the tokens of some rows as text, and with --loss-mask which of them are trained",
        "Trained text is coloured on a terminal and stands in ⟦ ⟧ elsewhere, the rest is context; in ⟨ ⟩ are special "
        "tokens, and characters that cannot be shown. A row that becomes no sample says why. With --json, one object "
        "a row and one for the total.",
        (_DATA, *_INSPECT, _tokens(), _ORDER),
    ),
    "bench": _Command(
        "measure on your data: the tokenizer's limit, how near the loader comes, the first batch, waits, memory",
        "Each figure comes with what it means and the knob to turn. Other programs on the machine disturb it; run it "
        "twice.",
        (_DATA, _tokens(), _ORDER, *_BENCH),
    ),
    "snapshot show": _Command(
        "print what a snapshot holds, after checking that it is whole",
        "",
        (_o("FILE", "the snapshot"),),
    ),
    "verify": _Command(
        "say whether two runs saw the same stream, by the digests in their snapshots",
        "Exit status: 0 if they did, up to the same position; 3 if not; 4 if the digests do not say, as where one run "
        "is ahead of the other.",
        _TWO,
    ),
    "cache ls": _Command("list token caches, or row indexes, the last used one last", "", _CACHES),
    "cache verify": _Command(
        "read token caches, and compare them with their checksums",
        "Exit status 1 if a segment is damaged. A run that meets one tokenizes its rows.",
        (_CACHES[0], _KEYS),
    ),
    "cache rm": _Command(
        "remove token caches, or row indexes",
        "One that a run is writing to stays.",
        (*_CACHES, _KEYS, _o("--all", "all of them", _FLAG)),
    ),
    "quarantine show": _Command(
        "print which rows are in a quarantine file, and what is wrong with them",
        "",
        (_QUARANTINE,),
    ),
    "quarantine retry": _Command(
        "read the rows in a quarantine file again, and write those that are good now to a JSONL file",
        "Each is looked for in its file where it began, or, if rows before it were changed, by its line; by its number "
        "where there are no lines. It is tokenized in this process; one that killed its worker is not tried. The "
        "quarantine file stays as it is.",
        (_QUARANTINE, _o("--output FILE", "where good rows are written", default="retried.jsonl"), _tokens("prompt")),
    ),
    "tokenizer prove": _Command(
        "find out whether the installed fast backends give the ids of tokenizers, and keep the answer",
        "Takes a minute for each, on one core. What is known already is shown, unless --again.",
        (*_PROVE, _TOKENIZER),
    ),
    "tokenizer show": _Command("say what is known about the fast backends of a tokenizer", "", (_TOKENIZER,)),
}
_EPILOG = """\
exit status:
  0    done
  1    the library refused, or failed: one message says what, where and the way out
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
    """The whole command line. ``run`` of a parsed one says where in ``asyncdata.cli.commands`` the command lies."""
    parser = _Parser(
        prog="asyncdata",
        description="An async, exactly resumable prefetching data loader for LLM post-training.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"asyncdata {__version__}")
    kinds: dict[str, Any] = {"title": "commands", "metavar": "COMMAND", "required": True}
    parents: dict[str, Any] = {"": parser.add_subparsers(**kinds)}
    for words, (about, more, arguments) in _COMMANDS.items():
        group, _, name = words.rpartition(" ")
        if group not in parents:
            parents[group] = _added(parents[""], group, _GROUPS[group]).add_subparsers(**kinds)
        child = _added(parents[group], name, about, more)
        child.set_defaults(run=f"{group}:{name}" if group else f"{name}:run")
        for argument in (*_EVERYWHERE, *arguments):
            _add(child, argument)
    return parser


def _added(parents: Any, name: str, about: str, more: str = "") -> argparse.ArgumentParser:
    description = f"{about[0].upper()}{about[1:]}. {more}".rstrip()
    parser: argparse.ArgumentParser = parents.add_parser(name, help=about, description=description, allow_abbrev=False)
    return parser


def _add(parser: Any, argument: _Option | _Group) -> None:
    if isinstance(argument, _Group):
        group = parser.add_argument_group(argument.title, argument.about) if argument.title else None
        group = group or parser.add_mutually_exclusive_group(required=True)
        for option in argument.options:
            _add(group, option)
        return

    words, about, kind, default, how = argument
    name, _, metavar = words.rpartition(" ")
    how = {"help": about if default in (None, []) else f"{about} (%(default)s)", **how}
    how |= kind if isinstance(kind, dict) else {"choices" if isinstance(kind, tuple) else "type": kind}
    if default is not None:
        how["default"] = default
    if name:
        how["metavar"] = metavar
    if words.startswith("-"):
        parser.add_argument(name or words, **{key: value for key, value in how.items() if value is not None})
    else:
        parser.add_argument(how.pop("dest", words.lower()), metavar=words, help=how["help"], nargs=how.get("nargs"))
