"""``asyncdata report``: writes the report of a run, from its telemetry, or serves it on an address of this machine
alone, made anew when the telemetry has grown (``--serve``).
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import msgspec

from asyncdata.cli.output import Output, fields, shown_path
from asyncdata.cli.shown_text import RowTexts, place_of, shown_record, shown_row_without_sample
from asyncdata.core.errors import ConfigError
from asyncdata.demo import docstring_prompts, tokenizer_folder
from asyncdata.report.page import Samples, write_page
from asyncdata.report.run_page import bad_rows_of, run_page
from asyncdata.telemetry.reader import Run, read
from asyncdata.telemetry.records import BadRowRecord, DroppedRow, SampleRecord

LOOPBACK = "127.0.0.1"


class ReportServer(ThreadingHTTPServer):
    """Serves one page, on loopback only.

    :param port: 0 for any that is free.
    :param page: makes the page; it is called when ``state`` has changed since, one call at a time.
    :raises OSError: if the port is in use.
    """

    daemon_threads = True

    def __init__(self, port: int, page: Callable[[], bytes], state: Callable[[], Hashable]) -> None:
        self._make, self._state, self._making = page, state, Lock()
        self._made: tuple[Hashable, bytes] | None = None
        super().__init__((LOOPBACK, port), _Handler)
        self.address = f"{LOOPBACK}:{self.server_port}"

    def page(self) -> bytes:
        """The page of the present telemetry."""
        with self._making:
            state = self._state()
            if self._made is None or self._made[0] != state:
                self._made = state, self._make()
            return self._made[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that has gone away is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer

    def do_GET(self) -> None:
        """The page; the name of the host is checked, so that no page of another server can read it."""
        if self.headers["Host"] not in (self.server.address, f"localhost:{self.server.server_port}"):
            self.send_error(403)
        elif self.path != "/":
            self.send_error(404)
        else:
            try:
                page = self.server.page()
            except Exception as error:
                self.send_error(500, explain=f"The report cannot be made: {error}")
                return

            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Nothing: the page is read by its user alone."""


_WEIGHTS = {"function": 0.6, "class": 0.3, "module": 0.1}
_STAGES = {1500: {"function": 0.4, "class": 0.4, "module": 0.2}}
_NUM_ROWS = 2500
_NUM_STEPS = 300
_STEP_S = 0.01
_RENEWED_S = 5
"""Seconds after which a served page renews itself, while the run goes on; more if it takes long to make."""

_BROKEN_ROW = '{"messages": [{"role": "user", "content": "this row is cut off'


def report(args: SimpleNamespace, output: Output) -> int:
    """The command."""
    if args.serve and not args.demo:
        return _serve(args, output)

    folder = os.path.dirname(os.path.abspath(args.output))
    if not os.access(folder, os.W_OK):  # before a run is recorded or read
        raise ConfigError(
            f"the page {args.output} cannot be written: {folder} is no folder that this user can write to"
        )

    if args.demo:
        output.say("a short run is recorded, to write its report")
        with tempfile.TemporaryDirectory(prefix="asyncdata-report-") as folder:
            found = read(_record_demo(Path(folder)))
    else:
        found = read(args.folder)
    samples = _samples(found, args.samples)
    name = "A demo" if args.demo else os.path.normpath(args.folder)
    write_page(args.output, run_page(name, found, samples, place_of))
    record: dict[str, Any] = {
        "page": args.output,
        "num_bytes": os.path.getsize(args.output),
        "num_samples": len(samples.shown),
        "num_samples_left_out": samples.num_left_out,
        "num_starts": len(found.starts),
    }
    output.put(record, lambda _: fields(_lines(args.output, record)))
    return 0


def _serve(args: SimpleNamespace, output: Output) -> int:
    """Serve the report until Ctrl-C."""
    folder = Path(args.folder)

    def page() -> bytes:
        began = time.monotonic()
        found = read(folder)
        is_live = any(start.end is None for start in found.generations[-1])
        name = os.path.normpath(args.folder)
        samples = _samples(found, args.samples)
        seconds = max(_RENEWED_S, 10 * round(time.monotonic() - began))  # a large run is read for less of the time
        return run_page(name, found, samples, place_of, renewed_s=seconds if is_live else 0)

    def state() -> tuple[tuple[str, int, int], ...]:
        paths = [(path, path.stat()) for path in sorted(folder.glob("rank-*.jsonl"))]
        return tuple((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in paths)

    with ReportServer(args.port, page, state) as server:
        server.page()  # what cannot be read is refused now, by name
        output.put({"address": f"http://{server.address}"}, lambda record: f"{record['address']}  Ctrl-C ends it\n")
        with suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0


def _samples(found: Run, max_samples: int) -> Samples:
    """The samples, and rows that were dropped or bad, in the order of their places."""
    samples, texts = Samples(max_samples), RowTexts(found.header.tokenizers)
    records: list[BadRowRecord | DroppedRow | SampleRecord]
    records = [*found.samples(), *found.dropped_rows(), *bad_rows_of(found)]
    for record in sorted(records, key=_place):
        if samples.is_full:
            samples.num_left_out += 1
        elif isinstance(record, SampleRecord):
            samples.add(shown_record(record, texts))
        else:
            samples.add(shown_row_without_sample(record))
    return samples


def _place(record: BadRowRecord | DroppedRow | SampleRecord) -> tuple[float, ...]:
    return (math.inf,) if record.place is msgspec.UNSET else record.place


def _lines(path: str, record: dict[str, Any]) -> list[tuple[str, str]]:
    left = f", of {record['num_samples'] + record['num_samples_left_out']:,}" if record["num_samples_left_out"] else ""
    return [
        ("page", f"{shown_path(path)}, {record['num_bytes']:,} bytes"),
        ("samples", f"{record['num_samples']:,}{left}"),
        ("starts", f"{record['num_starts']:,}"),
    ]


def _record_demo(folder: Path) -> Path:
    """A short run of chats about this Python's standard library, as a mixture, in packs; the folder of its telemetry.

    Only this needs the loader.
    """
    from asyncdata.batching.packers import SoftPacking
    from asyncdata.loader.loader import DataLoader
    from asyncdata.loader.mix import Mix, Part
    from asyncdata.telemetry.settings import Telemetry
    from asyncdata.tokenization.functions.chat import ChatTokenizeFn
    from asyncdata.workers.machine import num_usable_cpus

    parts = {kind: Part(path, weight=_WEIGHTS[kind]) for kind, path in _write_chats(folder).items()}
    telemetry = Telemetry(folder=str(folder / "demo"), samples=200, interval_s=0.1)
    with DataLoader(
        Mix(parts, stages=_STAGES, quota=100),
        tokenize_fn=ChatTokenizeFn(tokenizer_folder(), max_length=512),
        packing=SoftPacking(max_length=1024),
        batch_size=2,
        bad_rows="skip",
        num_workers=min(2, num_usable_cpus()),
        telemetry=telemetry,
    ) as loader:
        training = threading.Event()  # never set: a pretended step lasts as long as the wait for it
        for _ in islice(loader, _NUM_STEPS):
            training.wait(_STEP_S)
    return folder / "demo"


def _write_chats(folder: Path) -> dict[str, str]:
    """A file of chats for each kind of docstring; one of its rows is broken."""
    files = {kind: (folder / f"{kind}.jsonl").open("w", encoding="utf-8") for kind in _WEIGHTS}
    try:
        for row in islice(docstring_prompts(), _NUM_ROWS):
            turns = [{"role": "user", "content": row["input"]}, {"role": "assistant", "content": row["label"]}]
            files[row["metadata"]["kind"]].write(json.dumps({"messages": turns}) + "\n")
        files["function"].write(_BROKEN_ROW + "\n")
    finally:
        for file in files.values():
            file.close()
    return {kind: file.name for kind, file in files.items()}
