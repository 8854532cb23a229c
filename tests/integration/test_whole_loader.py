"""Every call meets every other: the loader and the model of tests/support/model.py walk side by side.

What is run are lines of Python, so that a failure prints a script of public calls that repeats it.
"""

from __future__ import annotations

import json
import shutil
from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.support import model, steps
from tests.support.examples import in_ci
from tests.support.faults import record
from tests.support.model import Model, Rules
from tests.support.model_order import KEPT, MAX_ROW_BYTES, Mixing, Packing, Part, seed_of_part
from tests.support.steps import start_of

NAMES = ("chat", "code", "math")
IS_LONG = settings.get_current_profile_name() == "long"
RECORDED, MAX_EPOCHS = ("jsonl.gz", "parquet"), 250
"""Kinds of sources whose order is taken from a plain run."""

# What a loader is made of.


class World(NamedTuple):
    """What does not change in a run."""

    files: dict[str, list[bytes]]
    mixing: Mixing
    seed: int
    rules: Rules
    is_shuffled: bool
    block_bytes: int
    window_blocks: int
    choose: str | None
    grows: bool
    kind: str
    has_pictures: bool


class Knobs(NamedTuple):
    """What may change at a restart."""

    world_size: int = 1
    batch: int = 1
    buffer_size: int = 20
    dp_size: int = 1
    max_ready_bytes: int = 1 << 30
    is_awaited: bool = False
    num_workers: int = 0
    is_over_gloo: bool = False


def line_of(number: int, fate: str) -> bytes:
    if fate == "blank":
        return b" " * (number % 3)

    row = {"id": number, "fate": fate, "pad": "x" * (80 if fate == "long" else number * 7 % 4 * 7)}
    return json.dumps(row).encode()[: -1 if fate == "garbled" else None]


def file_of(fates: list[str], first: int = 0, *, ends: bool = True) -> bytes:
    return b"\n".join(line_of(first + at, fate) for at, fate in enumerate(fates)) + b"\n" * ends


good = st.sampled_from([*["kept"] * 4, "short", "rude", "blank"])
mixed = st.sampled_from([*["kept"] * 9, "short", "fails", "garbled", "long", "blank"])
fates = st.one_of(
    st.lists(good, min_size=8, max_size=24),
    st.lists(mixed, min_size=1, max_size=8),
    st.lists(mixed, min_size=8, max_size=24),
)
weights = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
ends = st.tuples(st.sampled_from(["repeat", "leave", "stop"]), st.sampled_from([None, None, 1, 2]))
mixings = st.builds(
    Mixing,
    names=st.just(NAMES),
    by=st.sampled_from(["rows", "tokens"]),
    quota=st.integers(1, 7),
    weights=weights,
    stages=st.dictionaries(st.integers(1, 40), weights, max_size=2),
    ends=st.just({}) | st.fixed_dictionaries(dict.fromkeys(NAMES, ends)),
)
packings = st.builds(
    Packing, max_length=st.integers(5, 12), window=st.sampled_from([0, 0, 1, 4]), across_epochs=st.booleans()
)
knobs = st.builds(
    Knobs,
    world_size=st.sampled_from([*[1] * 6, 2, 3, 4]),
    batch=st.integers(1, 4),
    buffer_size=st.sampled_from([1, 5, 20, 200]),
    dp_size=st.integers(1, 2),
    max_ready_bytes=st.sampled_from([40, 1 << 30, 1 << 30]),
    is_awaited=st.sampled_from([False, False, True]),
    num_workers=st.sampled_from([*[0] * 19, 1]),
    is_over_gloo=st.sampled_from([*[False] * 9, True] if IS_LONG else [False]),
)


@st.composite
def worlds(draw: Any) -> World:
    is_mixture, is_packed = draw(st.booleans()), draw(st.sampled_from([False, False, True]))
    remembers = not is_packed and draw(st.booleans())
    is_full = False
    if is_mixture:
        mixing = draw(mixings)
        lists = {name: draw(st.lists(good, min_size=4, max_size=8)) for name in NAMES}
        files = {name: [file_of(["kept", *some])] for name, some in lists.items()}
    else:
        mixing, files, first = Mixing(), {"": []}, 0
        is_full = draw(st.sampled_from([False, False, True]))
        for some in draw(
            st.lists(st.lists(good, min_size=4, max_size=20) if is_full else fates, min_size=1, max_size=2)
        ):
            files[""].append(file_of(["kept", *some], first, ends=draw(st.booleans())))
            first += 1 + len(some)
    grows = not is_mixture and not is_full and draw(st.sampled_from([False, False, True]))
    tracks = not is_packed and draw(st.sampled_from([False, False, True]))
    stops = not is_mixture and draw(st.sampled_from([False, False, False, True]))
    rules = Rules(
        max_lag=None if is_packed else draw(st.sampled_from([None, None, 0, 1])),
        too_old=draw(st.sampled_from(["reset", "drop"])),
        size=1 if is_packed else draw(st.sampled_from([1, 1, 2])),
        epochs=draw(st.sampled_from([None, None, None, 1, 3])) if mixing.has_end or not is_mixture else None,
        drop_last=draw(st.sampled_from([False, False, True])),
        bad_row_stops=stops,
        max_bad_rows=None if stops or is_mixture else draw(st.sampled_from([None, None, None, 0, 5])),
        is_tracked=tracks,
        drop_above=0.9 if remembers else None,
        revisit_every=draw(st.sampled_from([None, 2, 3])) if remembers else None,
        packing=draw(packings) if is_packed else None,
    )
    others = ["jsonl.gz", "parquet", "store"] if not (is_mixture or is_full or grows) else []
    kind = draw(st.sampled_from(["jsonl", "jsonl", *others]))
    if kind in RECORDED:  # rows that a table can hold
        some = draw(st.lists(st.sampled_from([*["kept"] * 5, "short", "fails"]), min_size=9, max_size=24))
        files = {"": [file_of(["kept", *some])]}
    if grows:
        files[""] = [data.removesuffix(b"\n") + b"\n" for data in files[""]]
    is_planned = is_full and rules.packing is not None and not rules.packing.across_epochs
    rules = rules._replace(is_planned=is_planned)
    return World(
        files, mixing, draw(st.integers(-2, 42)), rules, draw(st.booleans()),
        *((0, 1) if is_full else draw(st.sampled_from([(16, 64), (64, 4), (64, 64), (150, 1), (150, 4)]))),
        draw(st.sampled_from([None, None, "newest", "oldest_but_one"])), grows, kind,
        not is_packed and draw(st.sampled_from([False, False, True])),
    )  # fmt: skip


# What can happen to it.


def event(name: str, **arguments: Any) -> Any:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


def often(times: int, name: str, **arguments: Any) -> list[Any]:
    """Events of their own: one_of takes a strategy that it is given several times as one."""
    return [event(name, **arguments) for _ in range(times)]


number, few, picks = st.integers(0, 50), st.integers(1, 7), st.lists(st.integers(0, 9), min_size=1, max_size=3)
scores = st.lists(st.sampled_from([0.0, 0.5, 1.0, 1.0]), min_size=3, max_size=3)
restarts = {"number": st.sampled_from([0, 0, 0, 1, 2, 3]), "knobs": knobs}
events = st.one_of(
    *often(6, "take", number=few),
    event("take_in_no_time", number=few),
    event("take_and_cancel", number=few, num_steps=st.integers(0, 6)),
    *often(2, "loop", number=st.integers(1, 5)),
    *often(2, "peek", number=st.integers(0, 20)),
    *often(5, "give_back", picks=picks, response=st.sampled_from(["", "so far"]), is_finished=st.booleans()),
    event("take_some", number=few, at_least=few),
    *often(4, "work", number=few, max_out=st.integers(1, 12), max_finished=st.sampled_from([None, None, 1, 3])),
    *often(2, "take_finished", number=few),
    event("begin_version", ahead=st.integers(-1, 2)),
    event("give_what_is_made_by_hand"),
    event("acknowledge", picks=picks),
    event("acknowledge_all"),
    *often(2, "track"),
    event("consume", picks=picks),
    event("drop", picks=picks),
    *often(5, "report", picks=picks, scores=scores, parts=st.booleans()),
    event("report_all", scores=scores),
    event("report_what_is_refused"),
    *often(4, "exclude", picks=picks),
    event("exclude_places", picks=picks),
    event("set_epoch", ahead=st.integers(-3, 2)),
    event("evaluate"),
    event("lose_exchange"),
    event("grow", fates=st.lists(good, min_size=1, max_size=3), is_new=st.booleans(), ends=st.booleans()),
    event("restart_with_other", what=st.sampled_from(["seed", "data", "renamed"]), knobs=knobs),
    *often(2, "save"),
    event("load", number=number),
    *often(
        2,
        "restart",
        **restarts,
        reweighs=st.booleans(),
        closes_first=st.booleans(),
        moves=st.booleans(),
        kills=st.sampled_from([*[False] * 9, True]),
        others=knobs,
    ),
)


OF_GROUPS = (
    "take_in_no_time", "take_and_cancel", "give_back", "give_what_is_made_by_hand", "acknowledge", "acknowledge_all",
    "track", "consume", "drop", "take_some", "work", "take_finished", "begin_version",
)  # fmt: skip
OF_HELD = "give_back", "acknowledge", "acknowledge_all", "consume", "drop", "report", "report_all", "exclude"


class WholeLoader(RuleBasedStateMachine):
    """A loader for each rank, beside the model.

    :ivar groups: of each rank, the groups that the trainer has, by number; ``held`` in the script.
    :ivar states: the model's; the loader's are ``states`` in the script.
    """

    num_steps, has_other_data = 0, False

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self.states: list[model.State] = []
        self.num_made = 0

    def run(self, line: str) -> Any:
        """Run a line of the script; return what it is, if it is an expression."""
        self.lines.append(line)
        try:
            try:
                code = compile(line, "<script>", "eval")
            except SyntaxError:
                return exec(line, self.names)  # noqa: S102
            return eval(code, self.names)  # noqa: S307
        except BaseException as error:
            if not hasattr(error, "__notes__"):
                error.add_note("the script that repeats it:\n\n" + "\n".join(self.lines))
            raise

    def check(self, call: str, wanted: Any) -> None:
        """Hold what a call returns against what the model says, after an epoch may have begun of files that grow."""
        self.run(f"found = {call}")
        self.look_at_growth()
        self.run(f"assert found == {wanted() if callable(wanted) else wanted!r}, found")

    def teardown(self) -> None:
        if "loaders" in self.names:
            self.end()
        if "folder" in self.names:
            shutil.rmtree(self.names["folder"])

    def end(self) -> None:
        """All ranks close; a call of the exchange that one of them still waits in fails."""
        self.run("end(loaders)")
        if "shared" in self.names:
            self.run("shared.end(), told_by.end()")
        del self.names["loaders"]

    # A loader is made.

    @initialize(world=worlds(), knobs=knobs)
    def begin(self, world: World, knobs: Knobs) -> None:
        self.world = world
        self.run("from tests.support.steps import *")
        self.run("folder = Path(tempfile.mkdtemp())")
        self.file_names = {
            part: [f"{part}{at}.{world.kind}" for at in range(len(f))] for part, f in world.files.items()
        }
        for part, files in world.files.items():
            for name, data in zip(self.file_names[part], files, strict=True):
                self.write(name, data)
        seeds = {name: seed_of_part(world.seed, name) if name else world.seed for name in world.files}
        order: list[Any] = [world.is_shuffled, world.block_bytes, world.window_blocks, world.rules.is_planned]
        order += [world.has_pictures, []]
        if world.kind in RECORDED:
            num_rows, path = world.files[""][0].count(b"\n"), self.names["folder"] / self.file_names[""][0]
            shuffle = eval(self.shuffle, self.names)  # noqa: S307
            order[-1] = steps.recorded(path, num_rows, MAX_EPOCHS, seed=world.seed, shuffle=shuffle)
        self.parts = {name: Part(name, files, seeds[name], *order, {}, {}) for name, files in world.files.items()}
        choose = getattr(steps, world.choose) if world.choose else None
        self.model = Model(self.parts, world.mixing, world.seed, world.rules, choose)
        self.stays = {self.first_kept(name) for name in self.parts if self.must_stay(name)}
        self.run("states = []")
        self.open(knobs)

    def write(self, name: str, data: bytes) -> None:
        self.run(f"path = folder / {name!r}")
        if self.world.kind == "jsonl.gz":
            self.run(f"path.write_bytes(gzip.compress({data!r}))")
        elif self.world.kind == "parquet":
            self.run(f"write_parquet(path, {data!r})")
        elif self.world.kind == "store":
            self.run(f"http_host().put(f'/{{folder.name}}/{name}', {data!r})")
        else:
            self.run(f"path.write_bytes({data!r})")

    def path(self, name: str) -> str:
        return f"stored(folder, {name!r})" if self.world.kind == "store" else f"str(folder / {name!r})"

    @property
    def shuffle(self) -> str:
        world = self.world
        if not world.block_bytes:
            return f"RowShuffle(method={'keyed' if world.is_shuffled else 'none'!r})"

        sizes = f"block_bytes={world.block_bytes}, window_blocks={world.window_blocks}"
        return f"Shuffle(enabled={world.is_shuffled}, {sizes})"

    def first_kept(self, name: str) -> Any:
        return next(row.key for row in self.parts[name].rows(0) if row.fate == KEPT)

    def must_stay(self, name: str) -> bool:
        """Some parts may be left out as a whole, but not those without which an epoch may be empty."""
        return name in ("", "math") or self.world.mixing.ends.get(name, ("",))[0] == "stop" or not self.packs_nothing

    @property
    def packs_nothing(self) -> bool:
        return self.world.rules.packing is None

    def source(self) -> str:
        def files(name: str) -> str:
            paths = ", ".join(f"folder / {file!r}" for file in self.file_names[name])
            return f"JsonlSource([{paths}], max_row_bytes={MAX_ROW_BYTES})"

        if self.world.kind in RECORDED:
            return f"folder / {self.file_names[''][0]!r}"

        if self.world.kind == "store":
            paths = ", ".join(map(self.path, self.file_names[""]))
            return f"JsonlSource([{paths}], max_row_bytes={MAX_ROW_BYTES}, storage_options=FAST)"

        if "" in self.parts:
            return f"JsonlSource(folder, max_row_bytes={MAX_ROW_BYTES}, grows={self.world.grows})"

        mixing, parts = self.model.mixing, []
        for name, weight in zip(mixing.names, mixing.weights, strict=True):
            when_done, max_epochs = mixing.ends.get(name, ("repeat", None))
            parts.append(
                f"{name!r}: Part({files(name)}, weight={weight}, when_done={when_done!r}, max_epochs={max_epochs})"
            )
        stages = {start: dict(zip(mixing.names, some, strict=True)) for start, some in mixing.stages.items()}
        settings = f"by={mixing.by!r}, quota={mixing.quota}, stages={stages!r}, on_mix_change='apply'"
        return f"Mix({{{', '.join(parts)}}}, {settings})"

    def open(self, knobs: Knobs) -> None:
        for line in self.opening(knobs):
            self.run(line)
        self.is_named, self.is_lost, self.restored, self.first_known = False, False, ((0, 0), 0), 0

    def opening(self, knobs: Knobs) -> list[str]:
        """The lines that make a loader for each rank."""
        self.knobs = knobs = knobs._replace(world_size=1) if self.world.grows else knobs
        world, rules, many = self.world, self.world.rules, knobs.world_size > 1
        settings: dict[str, Any] = {
            "tokenize_fn": "pictured" if world.has_pictures else "by_fate", "seed": world.seed,
            "epochs": rules.epochs, "drop_last": rules.drop_last,
            "n_samples_per_prompt": rules.size, "commit": repr("on_ack" if rules.is_tracked else "on_delivery"),
            "bad_rows": f"BadRows(policy={'raise' if rules.bad_row_stops else 'skip'!r}, max={rules.max_bad_rows})",
            "shuffle": self.shuffle, "plan_packs": world.rules.is_planned,
            "buffer_filter": world.choose if self.packs_nothing else None,
            "batch_size": knobs.batch * rules.size, "buffer_size": knobs.buffer_size,
            "dp_size": knobs.dp_size, "num_workers": knobs.num_workers, "timeout_s": 240,
            "limits": f"Limits(max_ready_bytes={knobs.max_ready_bytes}, max_media_bytes={knobs.max_ready_bytes})",
        }  # fmt: skip
        if rules.drop_above is not None:
            policy = f"PassRate(drop_above={rules.drop_above}, revisit_every={rules.revisit_every})"
            told = ", exchange=told_by.of(rank)" if many else ""
            settings["outcomes"] = f"Outcomes(policy={policy}{told})"
        self.model.is_tracked, self.model.now.tracks, self.model.now.version = rules.is_tracked, False, None
        self.model.rules = rules._replace(max_lag=None if many else rules.max_lag)
        if rules.max_lag is not None and not many:
            settings |= {"max_policy_lag": rules.max_lag, "too_old": repr(rules.too_old)}
            self.model.now.version = 0
        if rules.packing is not None:
            length, window, across = rules.packing
            soft = f"SoftPacking(max_length={length}, window_samples={window}, window_tokens=1, across_epochs={across})"
            settings["packing"] = soft if window else f"HardPacking(max_length={length}, across_epochs={across})"
        if many:
            shared = None if world.kind == "jsonl.gz" else "shared.of(rank)"  # refused, AD487
            settings["ranks"] = f"Ranks(rank=rank, world_size={knobs.world_size}, exchange={shared})"
        kind = "Awaited" if knobs.is_awaited and not many else "DataLoader"
        text = ", ".join(f"{name}={value}" for name, value in settings.items())
        meeting = f"Meeting{'OverGloo' * knobs.is_over_gloo}({knobs.world_size})"
        return [
            *[f"shared, told_by = {meeting}, {meeting}"] * many,
            f"loaders = [{kind}({self.source()}, {text}) for rank in range({knobs.world_size})]",
            "held = [{} for _ in loaders]", "loader = loaders[0]",
        ]  # fmt: skip

    # What is known of it.

    @property
    def serves_groups(self) -> bool:
        """Whether groups may be taken and given back: not by one of several ranks, nor where samples are packed."""
        return self.knobs.world_size == 1 and self.packs_nothing

    @property
    def groups(self) -> list[dict[Any, model.Group]]:
        """What each rank holds, as the model knows it."""
        return [{key: self.known[key] for key in held} for held in self.names["held"]]

    def expected(self, groups: list[model.Group]) -> list[Any]:
        self.known = getattr(self, "known", {}) | {group.ident: group for group in groups}
        return [group.told for group in groups]

    def chosen(self, picks: list[int], rank: int = 0) -> list[model.Group]:
        held = list(self.groups[rank].values())
        return [held[at] for at in sorted({at % len(held) for at in picks})] if held else []

    def text(self, groups: list[model.Group], rank: int = 0, method: str = "get") -> str:
        calls = {"get": "held[{0}][{1!r}]", "pop": "held[{0}].pop({1!r})"}
        return "[" + ", ".join(calls[method].format(rank, group.ident) for group in groups) + "]"

    @rule(happens=events)
    def step(self, happens: tuple[str, dict[str, Any]]) -> None:
        """One rule for all events: with a rule each, hypothesis would leave out half of them in every example."""
        WholeLoader.num_steps += 1
        name, arguments = happens
        if not self.may_be(name):
            name, arguments = "take", {"number": 1 + len(self.lines) % 4}
        getattr(self, name)(**arguments)
        self.look_at_growth()
        self.compare()

    def may_be(self, name: str) -> bool:
        """Whether an event is one of this loader, and has what it is about; if not, the loader trains."""
        if name in OF_HELD and self.packs_nothing and not any(self.names["held"]):
            return False

        if name.startswith("report"):
            return self.world.rules.drop_above is not None

        if name == "set_epoch" and self.world.rules.max_bad_rows is not None and not self.model.now.is_exact:
            return False  # how many bad rows are passed again is not known

        if name == "lose_exchange":
            return self.knobs.world_size > 1 and self.world.block_bytes > 0  # an index that is not shared ends the run

        if name in ("grow", "restart_with_other"):
            return self.world.grows if name == "grow" else "" in self.parts
        return self.serves_groups or name not in OF_GROUPS

    def compare(self) -> None:
        """Counters that must hold at all times."""
        now, found = self.model.now, self.names["loader"].statistics()
        size = self.world.rules.size
        wanted = {
            "tracked_groups": len(self.model.out), "buffered_groups": len(now.buffer),
            "dropped_groups_total": {reason: n for reason, n in now.group_drops.items() if n},
            "too_old_groups_total": dict(now.too_old),
        }  # fmt: skip
        if self.packs_nothing and now.is_exact:
            wanted |= {"groups_total": now.number, "samples_total": now.number * size, "tokens_total": now.num_tokens}
        if not self.packs_nothing:
            wanted |= {"packs_total": now.num_packs}
        assert {name: getattr(found, name) for name in wanted} == wanted, self.failed(found, wanted)
        assert self.names["loader"].policy_version == now.version, self.failed(now.version)
        if "" in self.parts and self.packs_nothing and now.is_exact:
            windows = self.parts[""].windows(found.epoch)
            at = sum(map(len, windows[: found.window])) + found.row
            here = found.epoch + 1 if at == sum(map(len, windows)) else found.epoch, at
            here = (here[0], 0) if here[0] > found.epoch else here
            drops = {reason: n for reason, n in found.dropped_total.items() if n}
            told, places = (here, drops, found.bad_rows_total), self.model.passed()
            assert told in [place for place, _ in places], self.failed(told, places)
            self.model.now = next(state for place, state in places if place == told)
        elif now.is_exact and self.packs_nothing:
            assert {name: part.samples for name, part in found.by_source.items()} == {
                name: now.samples[name] * size for name in self.parts
            }, self.failed()

    def failed(self, *said: Any) -> str:
        return f"{said}; the script that leads to it:\n\n" + "\n".join(self.lines)

    # The trainer takes.

    def take(self, number: int) -> None:
        if not self.serves_groups:
            return self.loop(1 + number % 2)

        return self.check(f"told(held[0], lambda: loader.get_samples({number}))", lambda: self.taken(number))

    def taken(self, number: int) -> tuple[list[Any], str]:
        groups, error = self.model.take(number)
        return self.expected(groups), error

    def take_some(self, number: int, at_least: int) -> None:
        """As many as are ready, but some."""
        least, most = sorted((number, at_least))
        call = f"told(held[0], lambda: loader.get_samples({most}, at_least={least}))"
        self.check(call, lambda: self.taken_some(most, least))

    def taken_some(self, number: int, least: int) -> tuple[list[Any], str]:
        num_found = len(self.names["found"][0])
        assert num_found <= number
        told = self.model.take(number, enough=max(num_found, least))
        return self.expected(told.groups), told.error

    def work(self, number: int, max_out: int, max_finished: int | None) -> None:
        """A loop over groups would wait where the model says so: only there is the number known before."""
        if self.world.grows and self.world.rules.epochs is not None:
            return

        limits = f"max_out={max_out}, max_finished={max_finished}"
        before = self.model.now
        self.model.now, is_tracked = before.copy(), self.model.is_tracked
        groups, why = self.model.work(number, max_out, max_finished)
        self.model.now, self.model.is_tracked = before, is_tracked
        number = len(groups) if why == "held" else number
        call = f"worked(held[0], loader, {number}, {limits})"
        self.check(call, lambda: self.worked(number, max_out, max_finished))
        if why == "held":
            self.run(f"assert is_held(loader, {limits})")

    def worked(self, number: int, max_out: int, max_finished: int | None) -> tuple[list[Any], str]:
        groups, error = self.model.work(number, max_out, max_finished)
        return self.expected(groups), error

    def take_finished(self, number: int) -> None:
        self.check(f"taken(held[0], loader.take_finished({number}))", lambda: self.finished(number))

    def finished(self, number: int) -> list[Any]:
        return self.expected(self.model.take_finished(number))

    def begin_version(self, ahead: int) -> None:
        version = max(0, (self.model.now.version or 0) + ahead)
        self.run(f"loader.policy_version = {version}")
        self.model.begin_version(version)

    def take_in_no_time(self, number: int) -> None:
        self.take_or_not(number, f"told(held[0], lambda: loader.get_samples({number}, timeout_s=0.0))")

    def take_and_cancel(self, number: int, num_steps: int) -> None:
        if self.knobs.is_awaited:
            self.take_or_not(number, f"cancelled(held[0], loader, {number}, {num_steps})")

    def take_or_not(self, number: int, call: str) -> None:
        """The groups are taken, or nothing has happened."""
        if self.serves_groups:
            nothing = [([], "PrefetchTimeoutError"), ([], "cancelled")]
            self.check(call, lambda: self.names["found"] if self.names["found"] in nothing else self.taken(number))

    def loop(self, number: int) -> None:
        place, runs_on = start_of(self.names["loader"]), not self.is_named
        self.is_named = False
        call = f"looped(held, loaders, {number}, {self.world.rules.size})"
        self.check(call, lambda: self.looped(number, *place, runs_on=runs_on))

    def looped(self, number: int, epoch: int, is_at_start: bool, *, runs_on: bool = True) -> list[Any]:
        world_size, size = self.knobs.world_size, self.knobs.batch * self.knobs.world_size
        if self.packs_nothing:
            made = self.model.loop(number, size, epoch, is_at_start=is_at_start, runs_on=runs_on)
        else:
            made = self.model.loop_packs(number, size, runs_on=runs_on)
        batches = [(0, batch) for batch in made.groups] if self.packs_nothing else made.groups
        found: list[Any] = []
        for rank in range(world_size):
            shares = []
            for first, batch in batches:  # the number of a planned pack decides its rank, but in a short batch
                turn = first if self.world.rules.is_planned and len(batch) == size else 0
                shares.append(
                    model.share_of(batch, (rank - turn) % world_size, world_size, size, rounds_up=world_size > 1)
                )
            told = self.expected if self.packs_nothing else lambda packs: list(map(self.model.delivered, packs))
            found.append(([told(share) for share in shares if share], made.error))
        return found

    def peek(self, number: int) -> None:
        if self.world.rules.packing is not None:
            return

        self.run(f"found = every(loaders, lambda _, loader: loader.peek({number}))")
        self.look_at_growth()
        wanted = [(group.number, *group.told[1:3], group.response) for group in self.model.peek(number)]
        found = self.names["found"][0]
        names = [(s.group_index, s.source_name or "", tuple(s.tokens.tolist()), s.response) for s in found]
        if self.world.has_pictures:  # of these, the plan has only counted the tokens
            wanted = [(*g[:2], (-1,) * len(g[2]) if g[2][0] % 2 else g[2], g[3]) for g in wanted]
        is_all = self.world.rules.drop_above is None
        assert names == (wanted if is_all else wanted[: len(names)]), self.failed(names, wanted)

    # Groups after their delivery.

    def give_back(self, picks: list[int], response: str, is_finished: bool) -> None:
        chosen = self.chosen(picks)
        if self.serves_groups and chosen:
            values = f"{response!r}, Status.{'COMPLETED' if is_finished else 'ABORTED'}"
            for group in chosen:
                self.run(f"for sample in held[0][{group.ident!r}]: sample.response, sample.status = {values}")
            self.run(f"loader.add_samples({self.text(chosen, method='pop')})")
            self.model.give_back([group._replace(response=response, is_finished=is_finished) for group in chosen])

    def give_what_is_made_by_hand(self) -> None:
        if self.serves_groups:
            self.num_made += 1
            name = f"made {self.num_made}"
            self.run(f"loader.add_samples([by_hand({name!r}, {self.world.rules.size})])")
            self.model.give_back([model.Group(None, None, 0, 0, name=name)])

    def acknowledge(self, picks: list[int]) -> None:
        if self.packs_nothing:
            chosen = self.chosen(picks)
            self.run(f"every(loaders, lambda _, loader: loader.ack({self.text(chosen)}))")
            self.model.end(chosen)

    def acknowledge_all(self) -> None:
        if self.packs_nothing:
            self.run("every(loaders, lambda _, loader: loader.ack())")
            self.model.end(self.model.out)

    def track(self) -> None:
        if self.serves_groups:
            self.run("loader.track()")
            self.model.track()

    def consume(self, picks: list[int]) -> None:
        if chosen := self.serves_groups and self.chosen(picks):
            out = {group.ident for group in self.model.out}
            is_out = self.model.is_tracked and all(group.ident in out for group in chosen)
            self.check(f"outcome(lambda: loader.consume({self.text(chosen)}))[1]", "" if is_out else "ConfigError")
            if is_out:
                self.model.end(chosen)

    def drop(self, picks: list[int]) -> None:
        if chosen := self.serves_groups and self.chosen(picks):
            call = f"outcome(lambda: loader.drop({self.text(chosen)}, 'stale'))"
            is_tracked = self.model.is_tracked
            self.check(call, (self.model.end(chosen, "stale"), "") if is_tracked else ([], "ConfigError"))

    # Scores.

    def report(self, picks: list[int], scores: list[float], parts: bool) -> None:
        """Of whole groups, or of the last sample of each; of groups of any age, and of some twice."""
        if self.world.rules.drop_above is None:
            return

        texts, told = [], []
        for rank in range(self.knobs.world_size):
            chosen = [group for group in self.chosen(picks, rank) if group.row is not None]
            found = [scores[at % len(scores)] if self.may_be_solved(group) else 0.0 for at, group in enumerate(chosen)]
            attempts = range(self.world.rules.size - 1 if parts else 0, self.world.rules.size)
            items = [f"held[{rank}][{group.ident!r}]" + ("[-1]" if parts else "") for group in chosen]
            texts.append(f"([{', '.join(items)}], {found})")
            told += [(group, at, score) for group, score in zip(chosen, found, strict=True) for at in attempts]
        self.run(f"reports = [{', '.join(texts)}]")
        call = "every(loaders, lambda rank, loader: outcome(lambda: loader.report(*reports[rank])))"
        wanted = ([], "WorkerError") if self.is_lost else (self.model.report(told), "")
        self.check(call, [wanted] * self.knobs.world_size)

    def report_all(self, scores: list[float]) -> None:
        self.report(list(range(100)), scores, parts=False)

    def report_what_is_refused(self) -> None:
        """One rank's report cannot be counted: none is."""
        if self.world.rules.drop_above is not None and not self.is_lost and self.chosen([0], 0):
            (group,) = self.chosen([0], 0)
            self.run(f"reports = [([held[0][{group.ident!r}]], [float('nan')])] + [([], [])] * {len(self.groups) - 1}")
            call = "every(loaders, lambda rank, loader: outcome(lambda: loader.report(*reports[rank]))[1])"
            self.check(call, ["InvalidGroupError", *["WorkerError"] * (len(self.groups) - 1)])

    def may_be_solved(self, group: model.Group) -> bool:
        return group.row is not None and group.row.key not in self.stays

    # Rows are left out.

    def exclude(self, picks: list[int]) -> None:
        """Rows of groups that the trainer has."""
        if self.packs_nothing:
            chosen = [group for group in self.chosen(picks) if self.may_be_solved(group)]
            keys = {group.row.key for group in chosen if group.row is not None}
            self.leave_out(self.text(chosen), keys)

    def exclude_places(self, picks: list[int]) -> None:
        """Rows that were served, or are ready, or come later, or never, as they are bad."""
        if self.world.kind in RECORDED:
            return

        rows = [row for part in self.parts.values() for row in part.rows(0) if row.key not in self.stays]
        if rows:
            chosen = [rows[at * 3 % len(rows)] for at in picks]
            places = ", ".join(
                f"{{'source': {row.part!r}, 'path': {self.path(self.file_names[row.part][row.file])}, "
                f"'byte_offset': {row.offset}, 'row_number': None}}" for row in chosen
            )  # fmt: skip
            self.leave_out(f"[{places}]", {row.key for row in chosen})

    def leave_out(self, text: str, keys: set[Any]) -> None:
        self.run(f"rows = {text}")
        self.check(
            "every(loaders, lambda _, loader: loader.exclude(rows))", [self.model.exclude(keys)] * len(self.groups)
        )

    # Epochs.

    def set_epoch(self, ahead: int) -> None:
        """Of files that grow, an earlier epoch has the rows that it had; one that a state has forgotten is refused."""
        epoch = self.names["loader"].epoch
        wanted = max(0, epoch + ahead)
        if "" not in self.parts:
            error = "" if wanted == epoch else "ConfigError"
            call = f"every(loaders, lambda _, loader: outcome(lambda: loader.set_epoch({wanted}))[1])"
            self.check(call, [error] * len(self.groups))
            self.is_named = self.is_named or not error
            return

        is_restored = self.restored == (self.progress, self.restored[1]) and wanted < self.restored[1]
        if wanted < epoch and (is_restored or wanted < self.first_known):
            call = f"every(loaders, lambda _, loader: outcome(lambda: loader.set_epoch({wanted}))[1])"
            self.check(call, ["ConfigError"] * len(self.groups))
        else:
            self.run(f"every(loaders, lambda _, loader: loader.set_epoch({wanted}))")
            self.is_named = True
            if wanted != epoch:
                self.model.set_epoch(wanted)

    @property
    def progress(self) -> tuple[int, int]:
        found = self.names["loader"].statistics()
        return found.samples_total, found.packs_total

    def evaluate(self) -> None:
        """Another loader over the same data, while this one waits."""
        text = f"DataLoader({self.source()}, tokenize_fn=by_fate, shuffle={self.shuffle}, num_workers=0, batch_size=3"
        self.run(f"with {text}, bad_rows='skip') as other: assert next(iter(other))")

    def lose_exchange(self) -> None:
        """The ranks do not reach each other any more: each makes all samples itself, and no score is counted."""
        self.run("shared.end(), told_by.end()")
        self.is_lost = True

    # The data change.

    def grow(self, fates: list[str], is_new: bool, ends: bool) -> None:
        """Lines are appended, the last one perhaps half written; or a file is added, which sorts before the others."""
        if self.world.grows:
            number = 100 + 10 * self.num_made
            self.num_made += 1
            name = f"-{self.num_made}.jsonl" if is_new else self.file_names[""][0]
            data = file_of(fates, number, ends=ends)
            self.run(f"with open(folder / {name!r}, 'ab') as file: file.write({data!r})")

    def look_at_growth(self) -> None:
        """What the epochs cover that have begun to be read: whole lines that are there."""
        if not self.world.grows:
            return

        self.run("growth = loader.state_dict()['growth']")
        part, found = self.parts[""], self.names["growth"]
        self.first_known = min(listing["epoch"] for listing in found)
        self.file_names[""] = max(([name for name, _, _ in listing["files"]] for listing in found), key=len)
        part.files[:] = [(self.names["folder"] / name).read_bytes() for name in self.file_names[""]]
        for epoch, files in (listing.values() for listing in found):
            part.covered[epoch] = [size for _, size, _ in files]
            ends = [data[:size][-1:] for data, (_, size, _) in zip(part.files, files, strict=False)]
            assert set(ends) <= {b"\n", b""}, self.failed(files)
        for epoch in range(self.first_known - 1, -1, -1):  # those that have begun and ended since the last look
            part.covered.setdefault(epoch, part.covered[epoch + 1])

    def restart_with_other(self, what: str, knobs: Knobs) -> None:
        """Other data, or another seed: refused; or the next epoch begins. Renamed files change nothing."""
        saved = self.model.saved()
        is_counted = self.world.rules.max_bad_rows is not None and not saved.is_exact
        if "" not in self.parts or self.world.grows or self.world.kind != "jsonl" or is_counted:
            return

        self.save()
        self.end()
        part = self.parts[""]
        old, allow = self.file_names[""][0], f"allow_changed={{{what!r}}}"
        self.num_made += 1
        if what == "seed":
            self.world = self.world._replace(seed=self.world.seed + 1)
            part = part._replace(seed=part.seed + 1, known={})
        elif what == "data":
            data = (
                part.files[0] + (b"" if part.files[0].endswith(b"\n") else b"\n") + line_of(100 + self.num_made, KEPT)
            )
            self.write(old, data)
            part = part._replace(files=[data, *part.files[1:]], known={})
            self.has_other_data = True  # groups of before keep the paths that they had
        else:
            self.file_names[""][0], allow = f"0{old}", "same_rows=True"
            self.run(f"(folder / {old!r}).rename(folder / {f'0{old}'!r})")
        self.parts[""] = part
        self.open(knobs)
        load = "loader.load_state_dict(json.loads(states[-1])"
        error = ["SnapshotMismatchError"] * len(self.groups)
        self.check(f"every(loaders, lambda _, loader: outcome(lambda: {load}))[1])", error)
        self.run(f"every(loaders, lambda _, loader: {load}, {allow}))")
        self.model.restore(self.states[-1])
        if what != "renamed":
            epoch = self.names["loader"].epoch
            reached = self.model.now.epoch if self.packs_nothing else self.model.epoch
            assert epoch in (reached, reached + 1), self.failed(epoch, reached)
            self.model.begin_with_other(epoch, is_data=what == "data")
        self.restored = self.progress, self.names["loader"].epoch
        self.run("states.clear()")
        self.states.clear()

    # States.

    def save(self) -> None:
        self.run("states.append(same_state(loaders))")
        state, now = json.loads(self.names["states"][-1]), self.model.now
        if now.is_exact and "" in self.parts and self.packs_nothing and not now.leases:
            digest = state["counters"]["digest"]
            assert (digest["num_samples"], digest["positions"], digest["order"]) == now.digest, self.failed()
        self.states.append(self.model.saved())

    def load(self, number: int) -> None:
        """Go back in a running loader."""
        if self.states:
            at = number % len(self.states)
            self.run(f"every(loaders, lambda _, loader: loader.load_state_dict(json.loads(states[{at}])))")
            self.run("for one in held: one.clear()")
            if self.world.grows:  # of later epochs it is not known any more what they cover
                last = max(listing["epoch"] for listing in json.loads(self.names["states"][at])["growth"])
                covered = self.parts[""].covered
                for epoch in [epoch for epoch in covered if epoch > last]:
                    del covered[epoch]
            self.model.restore(self.states[at])
            self.restored = self.progress, self.names["loader"].epoch

    def restart(
        self, number: int, knobs: Knobs, reweighs: bool, closes_first: bool, moves: bool, kills: bool, others: Knobs
    ) -> None:
        """All is gone but the states, of which one of the last is loaded, perhaps elsewhere or with other settings."""
        if not closes_first or not self.states:
            self.save()
        self.end()
        if moves and self.world.kind != "store" and not self.has_other_data:
            self.run("folder = folder.rename(folder.with_name(folder.name + '.'))")
        at = len(self.states) - 1 - number % len(self.states)
        if reweighs and "" not in self.parts:
            first, *rest = self.model.mixing.weights
            self.model.mixing = self.model.mixing._replace(weights=(first + 1, *rest))
        if kills and self.world.kind != "store" and not self.world.grows:
            return self.kill(at, 1 + number, others, knobs)

        self.open(knobs)
        self.load(at)

    def kill(self, at: int, number: int, first: Knobs, then: Knobs) -> None:
        """A process resumes, saves a file, takes more samples, and is killed; the next one restores the file."""
        lines = self.opening(first._replace(is_over_gloo=False))
        self.model.restore(self.states[at])
        lines.append(
            f"every(loaders, lambda _, loader: loader.load_state_dict(json.loads({self.names['states'][at]!r})))"
        )
        works = self.serves_groups and not self.world.rules.bad_row_stops
        if works:
            told = self.model.work(2 * number, 3 + number, None)
            wanted: Any = self.expected(told.groups), told.error.replace("held", "")
            asked = len(told.groups) + (told.error not in ("", "held"))
            lines.append(f"found = worked(held[0], loader, {asked}, max_out=99)")
            lines += self.ended(told.groups)
        else:
            lines.append(f"found = start_of(loader), looped(held, loaders, {number}, {self.world.rules.size})")
        lines.append("every(loaders, lambda rank, loader: loader.save(f'{folder}.{rank}'))")
        more = (
            "told(held[0], lambda: loader.get_samples(3))"
            if works
            else f"looped(held, loaders, 2, {self.world.rules.size})"
        )
        self.run(f"found = killed(folder, {[*lines, more]})")
        if not works:
            self.run("place, found = found")
            wanted = self.looped(number, *self.names["place"])
        self.run(f"assert found == {wanted!r}, found")
        saved = self.model.saved()
        self.open(then)
        self.model.restore(saved)
        self.run("every(loaders, lambda _, loader: loader.restore(f'{folder}.0'))")
        self.run("for path in folder.parent.glob(f'{folder.name}.*'): path.unlink()")
        self.restored = self.progress, self.names["loader"].epoch

    def ended(self, groups: list[model.Group]) -> list[str]:
        """The first group is trained, the second dropped; the third is finished, the fourth is to be gone on with."""
        lines = [f"loader.consume({self.text(groups[:1])})", f"loader.drop({self.text(groups[1:2])}, 'stale')"]
        self.model.end(groups[:1])
        self.model.end(groups[1:2], "stale")
        for group, word in zip(groups[2:4], ("COMPLETED", "ABORTED"), strict=False):
            one = f"held[0].pop({group.ident!r})"
            lines.append(f"group = {one}")
            lines.append(f"for sample in group: sample.response, sample.status = 'so far', Status.{word}")
            lines.append("loader.add_samples([group])")
            self.model.give_back([group._replace(response="so far", is_finished=word == "COMPLETED")])
        return lines


@pytest.fixture(scope="module", autouse=True)
def steps_are_counted(request: pytest.FixtureRequest) -> Any:
    """Figure R14, of a long run."""
    num_failed = request.session.testsfailed
    yield
    num_failed = request.session.testsfailed - num_failed
    if IS_LONG:
        record("R14", "the loader", steps=WholeLoader.num_steps, counterexamples=num_failed)


# With the profile "long" that is up to a million steps.
TestWholeLoader = WholeLoader.TestCase
TestWholeLoader.settings = settings(
    # A failure is its script, as it came: to look for a shorter one takes minutes, which CI does not have. And the same
    # steps each time: other ones are for `tox -e soak`.
    derandomize=settings.get_current_profile_name() == "ci",
    database=None,
    phases=(Phase.generate,) if settings.get_current_profile_name() == "ci" else tuple(Phase),
    max_examples=in_ci(30).max_examples,
    stateful_step_count=50,
    report_multiple_bugs=False,
    deadline=None,
)
