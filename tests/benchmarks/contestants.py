"""Who is in the contest: ours, and the peers that could be installed; each runs in a process of its own."""

import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.benchmarks.backends import FAST_BACKENDS
from tests.benchmarks.framework import Bench
from tests.benchmarks.peers.environments import AbsentError, environment
from tests.benchmarks.watching import measured

__all__ = ("OURS", "PEERS", "Contestant", "parts_of", "present")

SCRIPT = Path(__file__).parent / "peers" / "loaders.py"
TIMEOUT_S = 1200


class Contestant(NamedTuple):
    """A loader with a tokenizer backend.

    :ivar python: of its environment; empty for ours.
    :ivar peer: the class of its peer; empty for ours.
    """

    name: str
    label: str
    backend: str = "hf"
    python: str = ""
    peer: str = ""

    def epoch(self, bench: Bench, path: str, num_rows_at_most: int = 0, **more: Any) -> dict[str, float]:
        """An epoch in batches of 32, or its first rows: first batch, steady rate, rate end to end, memory."""
        if not self.peer:
            return bench.probe("contest", watched=True, num_rows_at_most=num_rows_at_most, **self._ours(bench, path))

        return self._run("epoch", bench, path, watched=True, num_rows_at_most=num_rows_at_most, **more)

    def paced(self, bench: Bench, path: str, rows_per_s: float, seconds: float) -> dict[str, float]:
        """``called_share``: the part of its time that a trainer which wants so many rows is in calls for them."""
        if not self.peer:
            return bench.probe("data_wait", rows_per_s=rows_per_s, seconds=seconds, **self._ours(bench, path))

        return self._run("paced", bench, path, rows_per_s=rows_per_s, seconds=seconds)

    def first_batch(self, bench: Bench, path: str) -> dict[str, float]:
        """Seconds from the first statement to the first batch."""
        if not self.peer:
            return bench.probe("first_batch", **self._ours(bench, path))

        return self._run("first_batch", bench, path)

    def save(self, bench: Bench, path: str, state: str, percents: list[int], num_rows: int, folder: str) -> None:
        """States after so many per cent of the rows, ``state.0`` and so on."""
        if not self.peer:
            bench.probe("make_snapshots", snapshot=state, percents=percents, **self._ours(bench, path))
            return

        self._run("save", bench, path, folder=folder, state=state, percents=percents, num_rows=num_rows)

    def resume(self, bench: Bench, path: str, state: str, folder: str) -> dict[str, float]:
        """Seconds from the first statement to the first batch after a restore."""
        if not self.peer:
            return bench.probe("resume", snapshot=state, **self._ours(bench, path))

        return self._run("resume", bench, path, folder=folder, state=state)

    def _ours(self, bench: Bench, path: str) -> dict[str, Any]:
        return {"path": path, "tokenizer": bench.tokenizer, "backend": self.backend, "num_workers": bench.num_workers}

    def _run(self, mode: str, bench: Bench, path: str, *, watched: bool = False, **settings: Any) -> dict[str, float]:
        with tempfile.TemporaryDirectory(dir=bench.folder) as scratch:
            settings = {
                **self._ours(bench, path),
                "mode": mode,
                "peer": self.peer,
                "parts": parts_of(path, bench.num_workers),
                "folder": f"{scratch}/converted",
                **settings,
            }
            variables = {
                "HF_HOME": f"{scratch}/hf",
                "HF_HUB_OFFLINE": "1",
                "TOKENIZERS_PARALLELISM": "true" if self.peer == "HfStreaming" else "false",
                "RAYON_NUM_THREADS": str(bench.num_workers),
                "DATA_OPTIMIZER_CACHE_FOLDER": f"{scratch}/litdata",
                "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{scratch}/litdata",
                "TMPDIR": scratch,
            }
            command = [self.python, str(SCRIPT), json.dumps(settings)]
            return measured(command, variables, watched=watched, timeout_s=TIMEOUT_S)


def parts_of(path: str, num_parts: int) -> list[str]:
    """The file cut into parts of whole rows, beside it; made once. Peers that cannot split a file get it split."""
    parts = [Path(f"{path}.part{number}of{num_parts}") for number in range(num_parts)]
    if not all(part.exists() for part in parts):
        lines = Path(path).read_bytes().splitlines(keepends=True)
        for number, part in enumerate(parts):
            start, stop = (len(lines) * edge // num_parts for edge in (number, number + 1))
            part.write_bytes(b"".join(lines[start:stop]))
    return [str(part) for part in parts]


OURS = "ours"
PEERS = {
    "hf": ("Hugging Face streaming", "hf", "HfStreaming"),
    **{f"hf {fast}": (f"Hugging Face streaming, {fast}", "hf", "HfStreaming") for fast in FAST_BACKENDS},
    "torchdata": ("StatefulDataLoader, 2 workers", "torchdata", "TorchData"),
    "grain": ("Grain, 2 workers", "grain", "Grain"),
    "mosaic": ("Mosaic Streaming, 2 workers", "mosaic", "Mosaic"),
    "mosaic_from_s3": ("Mosaic Streaming", "mosaic", "MosaicFromS3"),
    "litdata": ("LitData, 2 workers", "litdata", "LitData"),
    "legacy": ("legacy loader, all rows first", "legacy", "Legacy"),
}
"""Name: what it is called, its environment, its class in peers/loaders.py."""


def present(bench: Bench, *names: str) -> tuple[list[Contestant], dict[str, str]]:
    """Those of ``names`` that are there, and why the others are not."""
    found, absent = [], {}
    for name in names:
        kind, _, backend = name.partition(" ")
        if kind == OURS:
            backend = backend or "hf"
            if backend in bench.backends:
                found.append(Contestant(name, f"asyncdata, {backend}, {bench.num_workers} workers", backend))
            else:
                absent[name] = "not installed"
            continue

        label, home, script = PEERS[name]
        try:
            python = environment(home, bench.peers)
        except AbsentError as reason:
            absent[name] = f"absent: {reason}"
        else:
            found.append(Contestant(name, label, backend or "hf", python, script))
    return found, absent
