"""What a user says about a mixture: :class:`Mix` and :class:`Part`. Runs without numpy."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import math
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from asyncdata.core.errors import ConfigError
from asyncdata.core.files import open_regular
from asyncdata.core.settings import naming_settings, unknown_setting
from asyncdata.loader.config import BadRows, LoaderConfig, Policy

if TYPE_CHECKING:
    from asyncdata.order.mixture import Node
    from asyncdata.order.order import RowShuffle, Shuffle
    from asyncdata.sources.base import Source
    from asyncdata.sources.resolve import Paths
    from asyncdata.tokenization.base import TokenizeFn
    from asyncdata.tokenization.part_functions import PartFunctions


WhenDone = Literal["repeat", "leave", "stop"]
_WHEN_DONE = ("repeat", "leave", "stop")
_WEIGHT_STEPS = 1_000_000


class Part:
    """One data set of a :class:`Mix`.

    :param source: what a loader takes as its source; or another ``Mix``.
    :param weight: its share, in proportion to the others'; 0: none. None: 1, or by ``Mix(temperature=...)``.
    :param tokenize_fn: its tokenize function; None: the loader's.
    :param bad_rows: what is done with its bad rows; None: the loader's ``bad_rows``.
    :param when_done: after ``max_epochs`` epochs it can ``repeat``, each time in a new order; ``leave`` the others,
        whose weights then count alone; or ``stop``: the mixture's epoch ends.
    :param max_epochs: its epochs in one epoch of the mixture. None: one, or with ``repeat`` any number. A part that
        repeats, and has a ``max_epochs``, leaves after them.
    :param shuffle: the order of its rows; None: the loader's ``shuffle``.
    :raises ConfigError: for a value that cannot work.
    """

    @naming_settings
    def __init__(
        self,
        source: Source | Paths | Mix,
        *,
        weight: float | None = None,
        tokenize_fn: TokenizeFn | Callable[..., Any] | str | None = None,
        bad_rows: BadRows | Policy | Mapping[str, Any] | None = None,
        when_done: WhenDone = "repeat",
        max_epochs: int | None = None,
        shuffle: bool | Literal["full"] | Shuffle | RowShuffle | Mapping[str, Any] | None = None,
    ) -> None:
        if weight is not None:
            _check_weight("weight", weight)
        if when_done not in _WHEN_DONE:
            raise ConfigError(f"AD470 when_done is one of {', '.join(_WHEN_DONE)}; got {when_done!r}")

        if max_epochs is not None and (type(max_epochs) is not int or max_epochs < 1):
            raise ConfigError(f"AD470 max_epochs is a whole number from 1 on; got {max_epochs!r}")

        given = {"tokenize_fn": tokenize_fn, "bad_rows": bad_rows, "shuffle": shuffle}
        named = [name for name, value in given.items() if value is not None]
        if isinstance(source, Mix) and named:
            raise ConfigError(f"AD470 {', '.join(named)} of a part that is a Mix belong to the parts of that Mix")

        self.source = source
        self.weight = weight
        self.tokenize_fn = tokenize_fn
        self.bad_rows = bad_rows
        self.when_done = when_done
        self.max_epochs = max_epochs
        self.shuffle = shuffle

    def config(self, config: LoaderConfig, name: str) -> LoaderConfig:
        """The loader's configuration, as it holds for this part."""
        import msgspec

        own = {name: value for name in ("bad_rows", "shuffle") if (value := getattr(self, name)) is not None}
        checked = LoaderConfig.of({"bad_rows": config.bad_rows, "shuffle": config.shuffle, **own}) if own else config
        shuffle = _part_shuffle() if checked.shuffle is True else checked.shuffle
        return msgspec.structs.replace(
            config, seed=part_seed(config.seed, name), bad_rows=checked.bad_rows, shuffle=shuffle, epochs=None
        )


PART_WINDOW_BLOCKS = 256
"""Blocks of a part's window, with ``shuffle=True``: a quarter of a single source's. A batch has fewer samples of each
part, so that it is mixed as well; and 20 parts take less memory and time to read before the first batch."""


@cache
def _part_shuffle() -> Shuffle:
    from asyncdata.order.order import Shuffle

    return Shuffle(window_blocks=PART_WINDOW_BLOCKS)


class NamedPart(NamedTuple):
    """A part that is no mixture, with its dotted name."""

    name: str
    part: Part


class Mix:
    """A mixture of data sets, wherever a loader takes a source.

    ::

        Mix({"math": Part("math/*.jsonl", weight=5), "code": Part("code.parquet", weight=3), "chat": "chat.jsonl"})

    :param parts: by name; a value that is no Part is a Part of weight 1.
    :param by: ``rows``: the weights are shares of the samples; ``tokens``: of the tokens.
    :param quota: by rows, each part's number in every ``quota`` samples is its share; exactly, if that is whole.
    :param stages: {delivered samples: {name: weight}}: other weights from there on. A part that is not named has none;
        None instead of the weights: the weights of the parts.
    :param temperature: the weight of a part without a ``weight`` is ``size ** (1 / temperature)``, its size being the
        bytes of its files; 1 is by size, more is nearer to equal shares.
    :param on_mix_change: what a restart does if weights, stages, or which parts there are, have changed: ``error``
        refuses, ``apply`` continues with the new ones.
    :raises ConfigError: for a value that cannot work.
    """

    @naming_settings
    def __init__(
        self,
        parts: Mapping[str, Part | Mix | Source | Paths],
        *,
        by: Literal["rows", "tokens"] = "rows",
        quota: int = 1000,
        stages: Mapping[int, Mapping[str, float] | None] | None = None,
        temperature: float | None = None,
        on_mix_change: Literal["error", "apply"] = "error",
    ) -> None:
        if not hasattr(parts, "items"):
            raise ConfigError(
                f"AD470 a Mix takes its parts by name, as in Mix({{'math': Part('math.jsonl', weight=2), 'code': "
                f"'code.jsonl'}}); got a {type(parts).__name__}"
            )

        self.parts = {name: part if isinstance(part, Part) else Part(part) for name, part in parts.items()}
        self.by = by
        self.quota = quota
        self.stages = dict(stages or {})
        self.temperature = temperature
        self.on_mix_change = on_mix_change
        self._check()

    def _check(self) -> None:
        if not self.parts:
            raise ConfigError("AD470 a Mix has at least one part")

        for name in self.parts:
            if not isinstance(name, str) or not name or "." in name or not name.isprintable():
                raise ConfigError(f"AD470 a part's name is a text without dots and line breaks; got {name!r}")

        self._check_settings()
        self._check_stages()
        if not any(part.weight is None or part.weight > 0 for part in self.parts.values()):
            raise ConfigError("AD470 at least one part of a Mix has a weight above 0")

    def _check_settings(self) -> None:
        if self.by not in ("rows", "tokens"):
            raise ConfigError(f"AD470 by is 'rows' or 'tokens'; got {self.by!r}")

        if type(self.quota) is not int or self.quota < 1:
            raise ConfigError(f"AD470 quota is a whole number from 1 on; got {self.quota!r}")

        if self.on_mix_change not in ("error", "apply"):
            raise ConfigError(f"AD470 on_mix_change is 'error' or 'apply'; got {self.on_mix_change!r}")

        if self.temperature is not None:
            if not self.temperature > 0 or math.isinf(self.temperature):
                raise ConfigError(f"AD470 temperature is a number above 0; got {self.temperature!r}")

            if all(part.weight is not None for part in self.parts.values()):
                raise ConfigError("AD470 temperature makes the weights of parts without one, and every part has one")

    def _check_stages(self) -> None:
        for start, weights in self.stages.items():
            if type(start) is not int or start < 0:
                raise ConfigError(f"AD470 a stage begins at a number of delivered samples, from 0 on; got {start!r}")

            for name, weight in (weights or {}).items():
                if name not in self.parts:
                    known = ", ".join(sorted(self.parts))
                    raise ConfigError(f"AD470 the stage at {start} names {name!r}, and there are {known}")

                _check_weight(f"the weight of {name!r} at {start}", weight)
            if weights is not None and not any(weights.values()):
                raise ConfigError(f"AD470 the stage at {start} has no part with a weight above 0")

    def leaves(self, prefix: str = "") -> Iterator[NamedPart]:
        """All parts that are no mixtures, by their dotted names, in the order of the schedule's tree."""
        for name, part in sorted(self.parts.items()):
            if isinstance(part.source, Mix):
                yield from part.source.leaves(f"{prefix}{name}.")
            else:
                yield NamedPart(f"{prefix}{name}", part)

    def functions(self, default: Any) -> PartFunctions:
        """The tokenize function of every part.

        :param default: the loader's, for parts without one.
        :raises ConfigError: if a part has none.
        """
        from asyncdata.tokenization.part_functions import PartFunctions

        found = []
        for name, part in self.leaves():
            function = default if part.tokenize_fn is None else part.tokenize_fn
            if function is None:
                raise ConfigError(f"AD470 part {name!r} has no tokenize_fn, and the loader has none for it")

            found.append(function)
        return PartFunctions(found)

    def node(self, sizes: Mapping[str, int]) -> Node:
        """The tree of its schedules.

        :param sizes: bytes of each part, by dotted name.
        """
        from itertools import count

        return self._node("", sizes, count(), "repeat", None)

    def _node(self, name: str, sizes: Mapping[str, int], numbers: Any, when_done: str, max_epochs: int | None) -> Node:
        from asyncdata.order.mixture import Leaf, Node, whole_weights

        children: list[Leaf | Node] = []
        for short, part in sorted(self.parts.items()):
            full = f"{name}.{short}" if name else short
            if isinstance(part.source, Mix):
                children.append(part.source._node(full, sizes, numbers, part.when_done, part.max_epochs))  # noqa: SLF001
            else:
                children.append(Leaf(full, part.when_done, part.max_epochs, number=next(numbers)))
        own = self.weights({short: _size_of(f"{name}.{short}" if name else short, sizes) for short in self.parts})
        stages = []
        for start in sorted({0, *self.stages}):
            weights = self.stages.get(start) or own
            stages.append((start, whole_weights([weights.get(short, 0) for short in sorted(self.parts)])))
        ends = when_done, max_epochs
        return Node(name, *ends, children=tuple(children), stages=tuple(stages), by=self.by, quota=self.quota)

    def weights(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """The weight of each part. Those by temperature are whole millionths of the largest: the same everywhere."""
        exponent = 0.0 if self.temperature is None else 1 / self.temperature
        logs = {name: exponent * math.log(max(1, size)) for name, size in sizes.items()}
        most = max((logs[name] for name, part in self.parts.items() if part.weight is None), default=0.0)
        found: dict[str, float] = {}
        for name, part in self.parts.items():
            if part.weight is not None:
                found[name] = part.weight
            elif self.temperature is None:
                found[name] = 1
            else:
                found[name] = max(1, round(_WEIGHT_STEPS * math.exp(logs[name] - most))) / _WEIGHT_STEPS
        return found


def _size_of(name: str, sizes: Mapping[str, int]) -> int:
    """Bytes of a part, or of all parts below it."""
    if name in sizes:
        return sizes[name]

    return sum(size for leaf, size in sizes.items() if leaf.startswith(f"{name}."))


def _check_weight(what: str, weight: Any) -> None:
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not 0 <= weight < math.inf:
        raise ConfigError(f"AD470 {what} is a number from 0 on; got {weight!r}")


def part_seed(seed: int, name: str) -> int:
    """The seed of a part's own order. It depends on the part's name, so that other parts have no influence on it."""
    text = f"asyncdata part 1|{seed}|{name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


_OF_MIX = ("by", "quota", "stages", "temperature", "on_mix_change")
_OF_PART = ("source", "mix", "weight", "tokenize_fn", "bad_rows", "when_done", "max_epochs", "shuffle")
_MAX_DEPTH = 8


def mix_of_file(path: str | os.PathLike[str]) -> Mix:
    """The mixture that a file describes: TOML, YAML or JSON. Paths in it are relative to its folder.

    ::

        quota = 1000

        [parts.math]
        source = "math/*.jsonl"
        weight = 5

        [parts.web]
        mix = "web.toml"                # another such file, or its content

    :raises ConfigError: if it cannot be read, or describes none.
    """
    return _mix_of(os.path.expanduser(os.fspath(path)), 0)


def _mix_of(path: str, depth: int) -> Mix:
    if depth > _MAX_DEPTH:
        raise ConfigError(f"AD470 {path}: mixtures are nested more than {_MAX_DEPTH} deep; does a file name itself?")

    content = _read(path)
    try:
        return _mix(content, os.path.dirname(path), depth)
    except ConfigError as error:
        raise ConfigError(f"{error} (in {path})") from error


def _read(path: str) -> Any:
    try:
        with open_regular(path) as file:
            data = file.read()
        if path.endswith(".toml"):
            return tomllib.loads(data.decode())

        return json.loads(data) if path.endswith(".json") else _yaml(data, path)
    except OSError as error:
        raise ConfigError(f"AD470 the mixture {path} cannot be read: {error.strerror}") from error
    except ConfigError:
        raise
    except ValueError as error:  # of TOML, JSON and UTF-8
        raise ConfigError(f"AD470 the mixture {path} cannot be read: {error}") from error


def _yaml(data: bytes, path: str) -> Any:
    if not path.endswith((".yaml", ".yml")):
        raise ConfigError(f"AD470 a mixture is a file that ends in .toml, .yaml or .json; got {path}")

    if importlib.util.find_spec("yaml") is None:
        raise ConfigError(f"AD470 {path} needs PyYAML, which is not installed: pip install pyyaml; or use TOML")

    yaml = importlib.import_module("yaml")
    try:
        return yaml.safe_load(data)
    except yaml.YAMLError as error:
        raise ConfigError(f"AD470 the mixture {path} cannot be read: {error}") from error


def _mix(content: Any, folder: str, depth: int) -> Mix:
    if not isinstance(content, Mapping) or not isinstance(content.get("parts"), Mapping):
        raise ConfigError("AD470 a mixture has `parts`: a table of parts by name")

    _refuse_unknown(content, ("parts", *_OF_MIX), "a mixture")
    settings = {name: content[name] for name in _OF_MIX if content.get(name) is not None}
    if "stages" in settings:
        settings["stages"] = _stages(settings["stages"])
    return Mix(
        {str(name): _part(str(name), part, folder, depth) for name, part in content["parts"].items()}, **settings
    )


def _part(name: str, content: Any, folder: str, depth: int) -> Part:
    if isinstance(content, str | list):
        content = {"source": content}
    if not isinstance(content, Mapping) or ("source" in content) == ("mix" in content):
        raise ConfigError(f"AD470 part {name!r} has a `source`, or a `mix`")

    _refuse_unknown(content, _OF_PART, f"part {name!r}")
    settings = {key: value for key, value in content.items() if key not in ("source", "mix") and value is not None}
    inner = content.get("mix")
    if isinstance(inner, str):
        return Part(_mix_of(os.path.join(folder, os.path.expanduser(inner)), depth + 1), **settings)

    source = _mix(inner, folder, depth + 1) if inner is not None else _paths(content["source"], folder)
    return Part(source, **settings)


def _paths(source: Any, folder: str) -> Any:
    if isinstance(source, list):
        return [_paths(path, folder) for path in source]

    if not isinstance(source, str):
        raise ConfigError(f"AD470 a source in a file is a path or a list of paths; got {source!r}")

    is_local = "://" not in source
    return os.path.join(folder, os.path.expanduser(source)) if is_local else source


def _stages(stages: Any) -> dict[Any, Any]:
    """The stages, whose keys are texts in TOML and JSON; the text "parts" stands for the weights of the parts."""
    if not isinstance(stages, Mapping):
        raise ConfigError("AD470 `stages` is a table of weights by the number of delivered samples")

    return {
        int(start) if isinstance(start, str) and start.replace("_", "").isdecimal() else start: (
            None if weights == "parts" else weights
        )
        for start, weights in stages.items()
    }


def _refuse_unknown(content: Mapping[str, Any], known: tuple[str, ...], what: str) -> None:
    for name in content:
        if name not in known:
            raise ConfigError(f"AD470 {unknown_setting(str(name), known, of=what)}")
