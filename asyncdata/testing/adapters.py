"""The interface between the kit and a loader: open it over some rows, take batches, save and restore.

Needs only Python, as the whole kit does, so that it runs in the environment of any loader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ("FEATURES", "Adapter", "Knobs", "Loader", "ReportingLoader", "Rows", "Seen")

FEATURES = {
    "bad_rows": "it can skip rows that cannot be read",
    "filter": "it can leave rows out",
    "mixture": "it can mix several files by weights, which may change at a resume",
    "outcomes": "it can leave rows out of later epochs, by what is reported of them",
    "read_ahead": "it reads ahead of its consumer",
    "shuffle": "it can shuffle rows",
    "transform": "it can call a function with many rows at once",
    "workers": "it has worker processes",
}
"""What some loaders cannot do, and some checks need."""


class Rows(NamedTuple):
    """The data: JSONL files of rows ``{"row": n, "text": "..."}``, numbered from 0 across all files.

    A bad row has ``"bad": true``: the loader's function of rows must raise for it.

    :ivar paths: the files, in their order; in a mixture each is a part.
    :ivar num_rows: rows in all of them.
    """

    paths: list[str]
    num_rows: int


class Knobs(NamedTuple):
    """The settings of a loader.

    :ivar batch_size: rows of a batch. The last one of an epoch may have fewer, and is delivered.
    :ivar num_workers: worker processes; 0: none.
    :ivar shuffle: shuffle the rows, in another order in each epoch.
    :ivar seed: of the order.
    :ivar read_ahead: rows that may be read ahead, or held in a shuffle buffer.
    :ivar keep_every: a filter keeps only rows whose number is a multiple of it.
    :ivar transform_rows: rows with which a function of rows is called at once.
    :ivar passes_bad_rows: rows for which the function raises are skipped.
    :ivar skips_solved: rows that were reported as solved are left out from the next epoch on.
    :ivar weights: mix the files, with these shares of the rows. No file is read to its end then.
    """

    batch_size: int = 4
    num_workers: int = 0
    shuffle: bool = False
    seed: int = 7
    read_ahead: int = 8
    keep_every: int = 1
    transform_rows: int = 1
    passes_bad_rows: bool = False
    skips_solved: bool = False
    weights: tuple[float, ...] = ()

    def needs(self) -> set[str]:
        """The features out of :data:`FEATURES` that the loader needs for these settings."""
        wanted = {
            "bad_rows": self.passes_bad_rows,
            "filter": self.keep_every > 1,
            "mixture": bool(self.weights),
            "outcomes": self.skips_solved,
            "shuffle": self.shuffle,
            "transform": self.transform_rows > 1,
            "workers": self.num_workers > 0,
        }
        return {name for name, is_wanted in wanted.items() if is_wanted}


class Seen(NamedTuple):
    """A row that was delivered.

    :ivar row: its number.
    :ivar worker: the id of the process that made it; 0 if that is not known.
    """

    row: int
    worker: int = 0


class Loader(Protocol):
    """An open loader."""

    def next_batch(self) -> list[Seen]:
        """The next batch.

        :raises StopIteration: at an epoch's end; the next call begins the next epoch.
        """
        ...

    def state_dict(self) -> Any:
        """Its current state, as values that JSON has."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Continue from this state; called before the first batch."""
        ...

    def close(self) -> None:
        """Stop its processes."""
        ...


class ReportingLoader(Loader, Protocol):
    """A loader with the feature ``outcomes``."""

    def report(self, solved: Mapping[int, bool]) -> None:
        """Whether rows of the last batch are solved, by their numbers."""
        ...


class Adapter(Protocol):
    """A kind of loader. Its class takes no arguments and can be imported, as a check runs it in new processes.

    :ivar name: its name in reports.
    :ivar version: of the loader.
    :ivar lacks: features out of :data:`FEATURES` that it does not have, with the reason; checks that need them are not
        applicable.
    """

    name: str
    version: str
    lacks: Mapping[str, str]

    def open(self, rows: Rows, knobs: Knobs) -> Loader:
        """A loader over ``rows``, made as its own documentation says."""
        ...
