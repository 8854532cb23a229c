"""One epoch as an iterator: where it begins, where it ends, and what an interruption leaves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import EndOfData, NoSamplesError, Position, PrefetchTimeoutError
from asyncdata.delivery.ledger import Ledger
from asyncdata.loader.batches.base import BatchShare
from asyncdata.loader.batches.epoch import AsyncEpoch, Epoch
from asyncdata.loader.batches.sample_batches import SampleBatches

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


START = Position()
WHOLE = BatchShare(0, 1, 2, False)


class Script:
    """A loader that gives what it was told to, one thing for each request; samples are letters.

    :ivar asked: (number of groups, epoch) of each request.
    """

    def __init__(self, *answers: Any, start: Position = START, share: BatchShare = WHOLE) -> None:
        self.asked: list[tuple[int, int]] = []
        self.collated: list[Any] = []
        self._answers = list(answers)
        self._position = start
        self.share = share
        self.group_size = 1

    @property
    def ledger(self) -> Ledger:
        return Ledger(position=self._position)

    def commit(self, request: Any, packs: Any) -> bool:
        raise AssertionError("nothing is packed")

    def batches(self) -> SampleBatches:
        return SampleBatches(self, self.share, lambda samples: self.collate(samples), group_size=self.group_size)

    def next(self, batches: SampleBatches) -> Any:
        """One step of a loop, as the loaders make it."""
        wanted = batches.next_request()
        if wanted is None:
            return None

        try:
            return self.take(*wanted, batches.finish)
        except EndOfData as end:
            return batches.end(end)

    async def next_async(self, batches: SampleBatches) -> Any:
        return self.next(batches)

    def collate(self, samples: Any) -> str:
        self.collated.append(samples)
        return "".join(samples)

    def take(self, num_groups: int, epoch: int, finish: Callable[[Any], Any]) -> Any:
        self.asked.append((num_groups, epoch))
        answer = self._answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer

        self._position = Position(epoch, 0, 1) if answer else Position(epoch + 1, 0, 0)
        return finish(list(answer))


class Next:
    """``next(iterator)``, of either kind; None at the end."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def iterate(self, loader: Script) -> Any:
        if self.kind == "sync":
            return Epoch(loader.batches(), loader.next)

        return AsyncEpoch(loader.batches(), loader.next_async)

    def __call__(self, iterator: Any) -> Any:
        return next(iterator, None) if self.kind == "sync" else run(anext(iterator, None))


def run(step: Any) -> Any:
    """What a coroutine returns that never has to wait."""
    coroutine: Coroutine[Any, Any, Any] = step.__await__()
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("it waits")


@pytest.fixture(params=["sync", "async"])
def following(request: pytest.FixtureRequest) -> Next:
    return Next(request.param)


def end_of_data(samples: str = "") -> EndOfData:
    return EndOfData("end", [[sample] for sample in samples])


def batches(loader: Script, following: Next) -> list[Any]:
    """All of one loop."""
    iterator = following.iterate(loader)
    found = list(iter(lambda: following(iterator), None))
    assert following(iterator) is None, "the end is the end"
    return found


def test_a_loop_is_an_epoch_and_the_next_loop_is_the_next(following: Next) -> None:
    loader = Script("ab", "cd", "e", "", "fg", "")

    assert batches(loader, following) == ["ab", "cd", "e"]
    assert batches(loader, following) == ["fg"]
    assert loader.asked == [(2, 0)] * 4 + [(2, 1)] * 2


def test_a_loop_begins_in_the_epoch_that_the_loader_is_in(following: Next) -> None:
    loader = Script("ab", "", start=Position(7, 3, 5))

    assert batches(loader, following) == ["ab"]
    assert loader.asked == [(2, 7)] * 2


def test_nothing_is_asked_before_the_first_batch_is_wanted(following: Next) -> None:
    loader = Script("ab", "")
    iterator = following.iterate(loader)

    loader._position = Position(4, 0, 0)  # noqa: SLF001
    following(iterator)

    assert loader.asked == [(2, 4)]


def test_every_batch_is_collated_once(following: Next) -> None:
    loader = Script("ab", "cd", "")

    batches(loader, following)

    assert loader.collated == [["a", "b"], ["c", "d"]]


def test_what_the_end_of_data_carries_is_the_last_batch(following: Next) -> None:
    assert batches(Script("ab", end_of_data("c")), following) == ["ab", "c"]


def test_the_end_of_data_without_samples_ends_the_loop(following: Next) -> None:
    assert batches(Script("ab", end_of_data()), following) == ["ab"]
    assert batches(Script(end_of_data()), following) == []


def test_a_run_resumed_after_the_last_batch_of_an_epoch_continues_with_the_next(following: Next) -> None:
    """As the run did that was not interrupted."""
    loader = Script("", "ab", "", start=Position(0, 5, 7))

    assert batches(loader, following) == ["ab"]
    assert loader.asked == [(2, 0), (2, 1), (2, 1)]


def test_an_epoch_smaller_than_a_batch_is_an_error_and_no_endless_loop(following: Next) -> None:
    with pytest.raises(NoSamplesError, match="AD406 epoch 3 has fewer samples than one batch"):
        batches(Script("", start=Position(3, 0, 0)), following)
    with pytest.raises(NoSamplesError, match="AD406 epoch 1 has fewer"):
        batches(Script("", "", start=Position(0, 0, 9)), following)


def test_a_loop_continues_after_a_temporary_error(following: Next) -> None:
    loader = Script("ab", PrefetchTimeoutError("late"), "cd", "")
    iterator = following.iterate(loader)
    assert following(iterator) == "ab"

    with pytest.raises(PrefetchTimeoutError):
        following(iterator)

    assert [following(iterator), following(iterator)] == ["cd", None]


def test_a_batch_that_cannot_be_collated_does_not_count(following: Next) -> None:
    loader = Script("ab", "", start=Position(0, 1, 1))
    loader.collate = lambda samples: 1 / 0  # type: ignore[method-assign]
    iterator = following.iterate(loader)

    with pytest.raises(ZeroDivisionError):
        following(iterator)

    loader._answers[:] = ["", "cd", ""]  # noqa: SLF001
    del loader.collate
    assert following(iterator) == "cd", "as if the loop had not begun: that epoch had nothing left"


def test_an_iterator_is_its_own_and_leaves_nothing_suspended() -> None:
    """No generator: one that is abandoned would run its ``finally`` whenever it is collected."""
    loader = Script("ab")

    epoch, asynchronous = Next("sync").iterate(loader), Next("async").iterate(loader)

    assert iter(epoch) is epoch
    assert aiter(asynchronous) is asynchronous
    assert not hasattr(epoch, "close")
    assert not hasattr(asynchronous, "aclose")


def shares(size: int, world_size: int, *, rounds_up: bool) -> list[BatchShare]:
    return [BatchShare(rank, world_size, size, rounds_up) for rank in range(world_size)]


def test_each_rank_has_its_share_of_a_batch_of_all_ranks(following: Next) -> None:
    loaders = [Script("abcd", "efgh", "", share=share) for share in shares(4, 2, rounds_up=False)]

    assert [batches(loader, following) for loader in loaders] == [["ac", "eg"], ["bd", "fh"]]
    assert all(loader.asked == [(4, 0)] * 3 for loader in loaders)


def test_a_last_batch_is_filled_with_its_own_samples_so_that_all_ranks_have_one(following: Next) -> None:
    loaders = [Script("abcd", "e", "", share=share) for share in shares(4, 2, rounds_up=True)]

    assert [batches(loader, following) for loader in loaders] == [["ac", "ee"], ["bd", "ee"]]


def test_a_last_batch_that_is_not_filled_gives_ranks_what_there_is(following: Next) -> None:
    loaders = [Script("abcd", "e", "", share=share) for share in shares(4, 2, rounds_up=False)]

    assert [batches(loader, following) for loader in loaders] == [["ac", "e"], ["bd"]]


def test_a_share_is_of_whole_groups(following: Next) -> None:
    loaders = [Script("aabbccdd", "", share=share) for share in shares(4, 2, rounds_up=False)]
    for loader in loaders:
        loader.group_size = 2

    assert [batches(loader, following) for loader in loaders] == [["aacc"], ["bbdd"]]


def test_one_rank_rounds_up_only_if_it_is_asked_to(following: Next) -> None:
    assert batches(Script("abc", "d", "", share=BatchShare(0, 1, 3, True)), following) == ["abc", "ddd"]
    assert batches(Script("abc", "d", "", share=BatchShare(0, 1, 3, False)), following) == ["abc", "d"]
