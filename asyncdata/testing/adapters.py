"""What the kit has to know of a loader: how to make one over some rows, and how to take, save and restore.

Needs nothing but Python, as all of the kit: it runs wherever the loader does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("FEATURES", "Adapter", "Knobs", "Loader", "Rows", "Seen")

FEATURES = {
    "bad_rows": "a row that cannot be read may be passed over",
    "filter": "rows may be left out",
    "read_ahead": "it reads ahead of its consumer",
    "shuffle": "rows may be mixed",
    "transform": "a function may be given many rows at once",
    "workers": "it has worker processes",
}
"""What not every loader can do, and checks need."""


class Rows(NamedTuple):
    """The data: JSONL files of rows ``{"row": n, "text": "..."}``, numbered from 0 through all files.

    A row that is to be bad has ``"bad": true``: the loader's function of rows is to raise for it.

    :ivar paths: the files, in their order.
    :ivar num_rows: rows in all of them.
    """

    paths: list[str]
    num_rows: int


class Knobs(NamedTuple):
    """How the loader is to be made.

    :ivar batch_size: rows of a batch. The last one of an epoch may have fewer, and is delivered.
    :ivar num_workers: worker processes; 0: none.
    :ivar shuffle: mix the rows, each epoch otherwise.
    :ivar seed: of the order.
    :ivar read_ahead: rows that may be read ahead, or held to be mixed.
    :ivar keep_every: only rows whose number is a multiple of it; others are left out by a filter.
    :ivar transform_rows: rows that a function of rows is given at once.
    :ivar passes_bad_rows: rows for which the function raises are passed over.
    """

    batch_size: int = 4
    num_workers: int = 0
    shuffle: bool = False
    seed: int = 7
    read_ahead: int = 8
    keep_every: int = 1
    transform_rows: int = 1
    passes_bad_rows: bool = False

    def needs(self) -> set[str]:
        """What the loader must be able to do, out of :data:`FEATURES`."""
        wanted = {
            "bad_rows": self.passes_bad_rows,
            "filter": self.keep_every > 1,
            "shuffle": self.shuffle,
            "transform": self.transform_rows > 1,
            "workers": self.num_workers > 0,
        }
        return {name for name, is_wanted in wanted.items() if is_wanted}


class Seen(NamedTuple):
    """A row that was delivered.

    :ivar row: its number.
    :ivar worker: the process that made it; 0 where that is not known.
    """

    row: int
    worker: int = 0


class Loader(Protocol):
    """A loader at work."""

    def next_batch(self) -> list[Seen]:
        """The next batch.

        :raises StopIteration: at an epoch's end; the call after that begins the next one.
        """
        ...

    def state_dict(self) -> Any:
        """Its state of this moment, fit for JSON."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go on from there; called before the first batch."""
        ...

    def close(self) -> None:
        """Stop its processes."""
        ...


class Adapter(Protocol):
    """A kind of loader. Its class is made without arguments, and can be imported: a check runs it in processes.

    :ivar name: what a report calls it.
    :ivar version: of the loader.
    :ivar lacks: what it cannot do, out of :data:`FEATURES`, and why; checks that need it are not applicable.
    """

    name: str
    version: str
    lacks: Mapping[str, str]

    def open(self, rows: Rows, knobs: Knobs) -> Loader:
        """A loader over ``rows``, as its own documentation says to make one."""
        ...
