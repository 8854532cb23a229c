"""What adapters share: classes that inherit from a framework's, refusals of its settings, views with their state, and
scores of rows that it has carried through its own batches.
"""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from types import ModuleType
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import needing

if TYPE_CHECKING:
    from asyncdata.core.types import Sample
    from asyncdata.integrations.torch.datasets import LoaderOrderView, LoaderRowView
    from asyncdata.loader.loader import DataLoader

Scored = tuple[Sequence[Any], int, float]  # a row's key, one of its attempts in the epoch, and the score

# Classes


def made_on_first_use(
    module: str, package: str, makers: Mapping[str, tuple[type, str] | tuple[type, str, str] | Callable[[], type]]
) -> Callable[[str], type]:
    """The ``__getattr__`` of a module with classes that inherit from classes of ``package``.

    A class is made once, also for two threads, and is an attribute of the module from then on.

    :param module: the module's ``__name__``.
    :param package: the name by which pip knows it.
    :param makers: the name of each class -> our base class, and as ``package.module:Class`` that of the package, and
        its method that ours replaces, if its constructor calls one; or what imports the package and makes the class.
    """

    def find(name: str) -> type:
        if name not in makers:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")

        maker = makers[name]
        with needing(name, package):
            made = _joined(name, *maker) if isinstance(maker, tuple) else maker()

        made.__module__ = module  # pickle looks it up there
        kind: type = vars(sys.modules[module]).setdefault(name, made)
        return kind

    return find


def _joined(name: str, ours: type, theirs: str, *replaced: str) -> type:
    place, _, attribute = theirs.partition(":")
    found = need(importlib.import_module(place), attribute)
    for method in replaced:
        need(found, method)
    return type(name, (ours, found), {"__doc__": ours.__doc__})


# Names and settings of frameworks


def need(owner: Any, name: str) -> Any:
    """An attribute of a framework's module, class or object.

    Everything that an adapter touches and the framework does not promise is asked for here, so that another version of
    the framework is refused by name, and nothing is passed over.

    :raises ConfigError: AD644, if it has none; it names both versions.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        pass

    kind = owner if isinstance(owner, type | ModuleType) else type(owner)
    place = kind.__name__ if isinstance(kind, ModuleType) else f"{kind.__module__}.{kind.__qualname__}"
    package = place.partition(".")[0]
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        found = "of unknown version"
    run = f"asyncdata was run with {package} {RUN_WITH[package]}" if package in RUN_WITH else "asyncdata needs it"
    raise ConfigError(
        f"AD644 {place} of {package} {found} has no {name!r}: {run}. Install that version, or a newer asyncdata"
    )


RUN_WITH = {"torchtitan": "0.3.0", "transformers": "5.24.0", "trl": "1.16.0", "verl": "0.9.1"}
"""The versions with which the tests of the adapters were run last."""


def refuse(settings: Any, reasons: Mapping[str, str], message: str) -> None:
    """Refuse settings that are on.

    :param settings: has ``get``.
    :param reasons: the name of each such setting -> what it would do, and the way out.
    :param message: a template with ``{name}``, ``{value}`` and ``{reason}``.
    :raises ConfigError: naming the first one.
    """
    for name, reason in reasons.items():
        if value := settings.get(name):
            raise ConfigError(message.format(name=name, value=value, reason=reason))


# Views


class OfView:
    """What a framework takes for its data set or its loader, with the length and the state of a view."""

    _view: LoaderOrderView | LoaderRowView

    def __len__(self) -> int:
        return len(self._view)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last item, which the framework puts into its checkpoints."""
        return self._view.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the item that would have come next.

        :raises SnapshotError: if it is not such a state, or is of other data or settings.
        """
        self._view.load_state_dict(state)

    def close(self) -> None:
        """Close the loader."""
        self._view.close()


# Scores of rows. A row is known by a key in its fields.

KEY = "asyncdata_row"
"""The field of a row's key: the epoch, the id of the row, and of a mixture the name of its part."""

# ruff: noqa: SLF001 - the memory of outcomes is a part of this library, and this is the only place that needs it


def key_of(loader: DataLoader[Any, Any], sample: Sample) -> list[Any] | None:
    """The key of a sample's row, of numbers and text; None if the loader remembers no scores."""
    outcomes = loader._engine.outcomes
    return None if outcomes is None else outcomes.key_of(sample)


def report_scores(loader: DataLoader[Any, Any], scored: Iterable[Scored], attempts: int) -> int:
    """Remember scores; return how many were new. Scores that are no finite numbers are left out.

    :param attempts: of a row in an epoch.
    """
    from asyncdata.delivery.outcome_memory import MAX_SCORE, RowReport

    if loader._engine.outcomes is None:
        return 0

    found: dict[tuple[Any, ...], list[tuple[int, float]]] = {}
    for key, attempt, score in scored:
        if abs(score) <= MAX_SCORE:  # NaN is not
            found.setdefault(tuple(key), []).append((attempt, score))
    reports = [RowReport(row_id, epoch, scores, *part) for (epoch, row_id, *part), scores in found.items()]
    return loader._engine.count(reports, attempts)


def report_keys(loader: DataLoader[Any, Any], keys: Iterable[Any], scores: Iterable[float]) -> int:
    """The same for a batch that has all rollouts of its rows.

    :param keys: of each score.
    """
    attempts: Counter[tuple[Any, ...]] = Counter()
    scored = []
    for key, score in zip(map(tuple, keys), scores, strict=True):
        scored.append((key, attempts[key], float(score)))
        attempts[key] += 1
    return report_scores(loader, scored, max(attempts.values(), default=0))
