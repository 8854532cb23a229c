"""A state says a place that follows from the batches alone: there, new weights of a mixture begin, on every rank."""

import contextlib
import threading

import pytest

from asyncdata import HardPacking, LengthGrouping, Mix, Part, Ranks, Shuffle, SoftPacking
from asyncdata.errors import PrefetchTimeoutError
from tests.support import planned_media
from tests.support.loaders import make
from tests.support.loading import NEVER_S, write_rows
from tests.support.planned_media import NumberedMedia

SIZES = {"code": 97, "math": 61, "chat": 23}
SHUFFLE = Shuffle(block_bytes=256, window_blocks=4)
OLD, NEW = {"code": 5, "math": 3, "chat": 2}, {"code": 1, "math": 2, "chat": 7}
PACKINGS = {
    "hard": {"packing": HardPacking(max_length=16)},
    "across": {"packing": HardPacking(max_length=16, across_epochs=True)},
    "soft": {"packing": SoftPacking(max_length=16, window_samples=12, window_tokens=1)},
    "grouped": {"packing": SoftPacking(max_length=16, window_samples=12), "length_grouping": LengthGrouping(window=4)},
    "samples": {"length_grouping": LengthGrouping(window=8)},
}
NUM_BATCHES = 5


def text(row):
    """Up to seven tokens, all of which tell the row; some rows have none."""
    return [row["id"]] * (row["id"] % 8)


@pytest.fixture
def data(tmp_path):
    for name, number in SIZES.items():
        write_rows(tmp_path / f"{name}.jsonl", number)
        planned_media.write_rows(tmp_path / f"{name}.media.jsonl", num_rows=number)
    return tmp_path


def mix_of(data, weights, ending=".jsonl"):
    parts = {name: Part(data / f"{name}{ending}", weight=weight) for name, weight in weights.items()}
    return Mix(parts, quota=10, on_mix_change="apply")


def pieces_of(batch):
    """What a batch has of each sample: part, part's epoch, row, and the tokens from where."""
    documents = [piece for item in batch for piece in (item if isinstance(item, list) else [item])]
    samples = [(getattr(one, "sample", one), getattr(one, "start", 0), len(one.tokens)) for one in documents]
    return [(s.source_name, s.source_epoch, int(s.tokens[0]), start, number) for s, start, number in samples]


def batches(mix, rank=0, number=NUM_BATCHES, state=None, ahead=lambda loader: None, **settings):
    """The batches of one rank, and the state after each."""
    found, states = [], []
    settings = {"tokenize_fn": text, "shuffle": SHUFFLE, "batch_size": 2, **settings}
    with make(mix, ranks=Ranks(rank=rank, world_size=2), **settings) as loader:
        if state is not None:
            loader.load_state_dict(state)
        while len(found) < number:
            for batch in loader:
                found.append(pieces_of(batch))
                ahead(loader)
                states.append(loader.state_dict())
                if len(found) == number:
                    break
    return found, states


@pytest.mark.parametrize("kind", PACKINGS)
def test_new_weights_begin_at_the_same_sample_whatever_each_rank_has_read_ahead(data, kind):
    settings = PACKINGS[kind]
    old, new = mix_of(data, OLD), mix_of(data, NEW)

    def continued(rank, buffer_size, **other):
        _, states = batches(old, rank, buffer_size=buffer_size, **settings, **other)
        return batches(new, rank, 8, states[-1], **settings)[0]

    wanted = [continued(rank, None) for rank in range(2)]
    assert [continued(0, None), continued(1, 20)] == wanted
    assert [continued(0, 6), continued(1, 200)] == wanted
    pieces = [piece for found in wanted for batch in found for piece in batch]
    assert len(set(pieces)) == len(pieces)


@pytest.mark.parametrize(("kind", "workers"), [("soft", 0), ("grouped", 0), ("samples", 2)])
def test_media_that_are_loaded_ahead_move_no_place(data, kind, workers):
    settings = {**PACKINGS[kind], "tokenize_fn": NumberedMedia()}
    old, new = mix_of(data, OLD, ".media.jsonl"), mix_of(data, NEW, ".media.jsonl")

    def is_read_ahead(loader):
        while loader.statistics().ready_samples < 100:
            threading.Event().wait(0.001)

    def continued(rank, buffer_size, ahead=lambda loader: None):
        _, states = batches(old, rank, buffer_size=buffer_size, ahead=ahead, num_workers=workers, **settings)
        return batches(new, rank, 8, states[-1], **settings)[0]

    wanted = [continued(rank, 4) for rank in range(2)]
    assert [continued(0, 4), continued(1, 200, is_read_ahead)] == wanted


@pytest.mark.parametrize("number", [3, 4])
def test_a_state_after_a_smaller_batch_of_samples_that_came_again_goes_on_with_the_schedule(data, number):
    """Packs that waited for the rest of a batch fill smaller ones after a restart, without a new sample."""
    settings = {"packing": HardPacking(max_length=16), "length_grouping": LengthGrouping(window=8)}
    mix = mix_of(data, OLD)
    _, states = batches(mix, number=number, batch_size=2, **settings)
    wanted, states = batches(mix, number=12, state=states[-1], batch_size=1, **settings)
    assert batches(mix, number=11, state=states[0], batch_size=1, **settings)[0] == wanted[1:]


def test_a_batch_that_was_waited_for_in_vain_moves_no_place(data):
    """Some of its samples were packed when the time was over."""
    is_open = threading.Event()
    is_open.set()

    def gated(row):
        is_open.wait(NEVER_S)
        return text(row)

    def place(loader):
        return {name: part for name, part in loader.state_dict().items() if name in {"mixture", "packing", "position"}}

    packing = HardPacking(max_length=64)
    with make(mix_of(data, OLD), gated, packing=packing, batch_size=1, buffer_size=4, timeout_s=0.05) as loader:
        num_batches = 0
        while num_batches < 3:
            with contextlib.suppress(PrefetchTimeoutError):
                num_batches += bool(next(iter(loader)))
        is_open.clear()
        before, position = place(loader), loader.position()
        while loader.position() == position:
            with pytest.raises(PrefetchTimeoutError):
                next(iter(loader))
        assert place(loader) == before
        is_open.set()
