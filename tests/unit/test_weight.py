"""What the package weighs, in lines of code: all of it, and what a plain loader imports. The numbers may only become
smaller: more weight is a line in a diff, which someone decides.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tokenize
from pathlib import Path

from asyncdata.demo import tokenizer_folder

PACKAGE = Path(__file__).parents[2] / "asyncdata"

MAX_LINES = 39_975
MAX_PLAIN_LINES = 10_460
"""What a loader over JSONL with PromptTokenizeFn and two workers imports into the trainer's process."""

WINGS = (
    "batching.online", "batching.packers", "batching.planned", "cli", "delivery.media_queue", "delivery.merger",
    "delivery.outcome_memory", "delivery.quarantine", "integrations", "loader.exclusions", "loader.loader_media",
    "loader.mix", "loader.mixture_engine", "loader.opened_rows", "loader.outcomes", "loader.proving",
    "loader.recording", "loader.opened_rows", "loader.wait_progress", "order.mixture", "read_ahead.mixture",
    "read_ahead.ranks", "read_ahead.row_index", "read_ahead.indexed_windows",
    "read_ahead.ranks", "read_ahead.stream_windows", "report", "sources.arrow",
    "sources.growing", "sources.remote.reads", "sources.remote.store", "sources.text_stream", "telemetry.recorder",
    "tokenization.pictures", "workers.inline", "workers.ray.executor", "workers.request_handler",
)  # fmt: skip
"""What is imported only where its setting is set."""

PLAIN = """
import sys
from asyncdata import DataLoader, JsonlSource, PromptTokenizeFn

path, folder = sys.argv[1:]
settings = {"tokenize_fn": PromptTokenizeFn(folder), "num_workers": 2, "batch_size": 8, "epochs": 1}
with DataLoader(JsonlSource(path), **settings) as loader:
    batches = iter(loader)
    next(batches)
    state, numbers = loader.state_dict(), loader.statistics().to_dict()
with DataLoader(JsonlSource(path), **settings) as loader:
    loader.load_state_dict(state)
    for batch in loader:
        pass
print(*(name for name in sys.modules if name.partition(".")[0] == "asyncdata"))
"""


def code_lines(text: str) -> int:
    """Lines with code: no comments, docstrings and blank lines."""
    between = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    silent = between | {tokenize.COMMENT, tokenize.NL, tokenize.ENDMARKER}
    lines: set[int] = set()
    before = tokenize.NEWLINE
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent and not (token.type == tokenize.STRING and before in between):
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type not in {tokenize.COMMENT, tokenize.NL}:
            before = token.type
    return len(lines)


def lines_of(path: Path) -> int:
    return code_lines(path.read_text(encoding="utf-8"))


def test_the_package_does_not_outgrow_what_was_decided():
    assert sum(map(lines_of, PACKAGE.rglob("*.py"))) <= MAX_LINES


def test_a_plain_loader_imports_no_wing_and_less_than_what_was_decided(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(f'{{"input": "What is {n} + 7?"}}\n' for n in range(40)))

    command = [sys.executable, "-c", PLAIN, str(data), str(tokenizer_folder())]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=PACKAGE.parent).stdout
    names = [name.removeprefix("asyncdata.") for name in printed.split() if name != "asyncdata"]
    files = [PACKAGE.joinpath(*name.split(".")) for name in names]
    paths = [path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py" for path in files]

    assert len(names) > 50
    assert [name for name in names if name.startswith(WINGS)] == []
    assert sum(map(lines_of, paths)) + lines_of(PACKAGE / "__init__.py") <= MAX_PLAIN_LINES
