"""PPOExp and OrderSampler in SkyRL's own trainers and checkpoints. ASYNCDATA_SKYRL names a checkout of it."""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any

import pytest

from asyncdata.integrations.skyrl_sft import OrderSampler
from tests.support.frameworks import skyrl_sft
from tests.support.frameworks.killed_runs import checkout, resumed_of, run_driver, told
from tests.support.frameworks.skyrl import BATCHES, EPOCHS, PACKAGES, ROWS, VARIABLE

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(900)]

# Whether it is ours, asynchronous, and drops rows, the batch size, and where it saves: also at the end of an epoch.
IN_ORDER = {
    "ours, a short last batch": [True, False, False, 4, [3, 10, 13]],
    "ours, whole batches": [True, False, False, 6, [3, 7, 9]],
}
ASYNC = {
    "ours, asynchronous, a short last batch": [True, True, False, 4, [3, 10, 13]],
    "ours, asynchronous, whole batches": [True, True, False, 6, [3, 7, 9]],
    "ours, asynchronous, rows without a reward's spread are dropped": [True, True, True, 4, [3, 8, 11]],
}
OWN = {
    "SkyRL's, a short last batch": [False, False, False, 4, [3, 10, 13]],
    "SkyRL's, whole batches": [False, False, False, 6, [3, 7, 9]],
    "SkyRL's, asynchronous": [False, True, False, 4, [3, 10, 13]],
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkout(VARIABLE, "skyrl/train/fully_async_trainer.py", PACKAGES)
    folder = tmp_path_factory.mktemp("skyrl")
    return run_driver("tests.support.frameworks.skyrl", folder, runs=IN_ORDER | ASYNC | OWN)


@pytest.mark.parametrize("name", IN_ORDER)
def test_a_killed_run_of_skyrl_continues_with_exactly_the_next_row(found: dict[str, Any], name: str) -> None:
    runs = found["runs"][name]
    for resumed in resumed_of(runs):
        assert resumed.trained == runs["whole"], f"killed after a save at step {resumed.save_at}"
        assert (resumed.skipped, resumed.repeated) == (0, 0)


@pytest.mark.parametrize("name", ASYNC)
def test_a_killed_asynchronous_run_trains_on_each_row_as_often_as_one_that_was_not_killed(
    found: dict[str, Any], name: str
) -> None:
    """Rollouts end in an order that depends on time, so the batches may differ, and the rows may not."""
    for resumed in resumed_of(found["runs"][name]):
        assert (resumed.skipped, resumed.repeated) == (0, 0), f"killed after a save at step {resumed.save_at}"


@pytest.mark.parametrize("name", IN_ORDER | ASYNC)
def test_all_epochs_are_trained_and_their_rows_come_equally_often(found: dict[str, Any], name: str) -> None:
    """The short batch of an epoch begins the next one."""
    batch = (IN_ORDER | ASYNC)[name][3]
    rows = [row for batch in found["runs"][name]["whole"] for row in batch]
    times = {rows.count(row) for row in range(ROWS)}

    assert len(rows) == ROWS // batch * batch * EPOCHS
    assert max(times) - min(times) <= 1


@pytest.mark.parametrize("name", IN_ORDER)
def test_each_pass_over_the_data_has_each_row_once_in_an_order_of_its_own(found: dict[str, Any], name: str) -> None:
    rows = [row for batch in found["runs"][name]["whole"] for row in batch]
    first, second = rows[:ROWS], rows[ROWS : 2 * ROWS]

    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second


def test_prompts_are_those_of_skyrls_data_set_also_in_which_are_too_long(found: dict[str, Any]) -> None:
    ours, theirs = found["prompts"]

    assert ours == theirs
    assert [item["env_extras"]["number"] for item in ours] == [number for number in range(ROWS) if number % 7 != 6]


def test_what_skyrl_would_only_log_is_refused(found: dict[str, Any]) -> None:
    assert found["refused"]["another seed"].startswith("AD603")
    assert found["refused"]["no state"].startswith("AD602 the checkpoint has no readable data.pt")
    assert found["refused"]["a loader of SkyRL"].startswith("AD463 a loader of SkyRL reads the prompts of PPOExp")


def test_the_command_and_the_lines_of_the_page_give_the_same_settings_also_in_a_process_of_ray(
    found: dict[str, Any],
) -> None:
    assert found["knobs"] == [{"num_workers": 2, "seed": 1}] * 2
    assert found["sent"] == ["asyncdata.integrations.skyrl 4 ['num_workers', 'seed']"]


def test_what_skyrls_own_loader_does_with_the_same_kill(found: dict[str, Any]) -> None:
    """Shown with ``-s``. Whatever it does, it comes to the end."""
    sys.stdout.write("\n" + told(found["runs"]))

    assert all(len(resumed.trained) == BATCHES for runs in found["runs"].values() for resumed in resumed_of(runs))


# SFT. Its last, short batch is trained on, and saved with the end of the epoch; after whole batches that is not seen.
SFT = {"ours, a short last batch": [True, 4, [3, 11, 13]], "ours, whole batches": [True, 6, [3, 7, 9]]}
OWN_SFT = {"SkyRL's, a short last batch": [False, 4, [3, 11, 13]], "SkyRL's, whole batches": [False, 6, [3, 7, 9]]}


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    checkout(VARIABLE, "skyrl/train/sft_trainer.py", PACKAGES)
    folder = tmp_path_factory.mktemp("skyrl_sft")
    return run_driver("tests.support.frameworks.skyrl_sft", folder, runs=SFT | OWN_SFT)


@pytest.mark.parametrize("name", SFT)
def test_a_killed_sft_run_of_skyrl_continues_with_exactly_the_next_row(sft: dict[str, Any], name: str) -> None:
    for resumed in resumed_of(sft["runs"][name]):
        assert resumed.trained == sft["runs"][name]["whole"], f"killed after a save at step {resumed.save_at}"
        assert (resumed.skipped, resumed.repeated) == (0, 0)


@pytest.mark.parametrize("name", SFT)
def test_each_epoch_of_an_sft_run_has_each_row_once_in_an_order_of_its_own(sft: dict[str, Any], name: str) -> None:
    rows = [row for batch in sft["runs"][name]["whole"] for row in batch]
    epochs = [rows[start : start + ROWS] for start in range(0, len(rows), ROWS)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * EPOCHS
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS


def test_an_sft_run_with_another_seed_is_refused_and_not_only_logged(sft: dict[str, Any]) -> None:
    assert sft["refused"].startswith("AD603 the checkpoint has seed=1, and the sampler seed=2")


def test_what_skyrls_own_sampler_does_with_the_same_kill(sft: dict[str, Any]) -> None:
    """Shown with ``-s``. Whatever it does, it comes to the end."""
    sys.stdout.write("\n" + told(sft["runs"]))

    assert all(
        len(resumed.trained) == skyrl_sft.BATCHES for runs in sft["runs"].values() for resumed in resumed_of(runs)
    )


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # a call of torchdata
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_order_is_continued_exactly_with_workers_of_torch_too(num_workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")

    def opened() -> Any:
        rows = list(range(ROWS))
        sampler = OrderSampler(rows, seed=1)
        return torchdata.StatefulDataLoader(
            rows, batch_size=4, sampler=sampler, num_workers=num_workers, collate_fn=list
        )

    def taken(loader: Any, number: int) -> list[list[int]]:
        return list(islice((batch for _ in range(EPOCHS) for batch in loader), number))

    whole = taken(opened(), 25)
    for number in (1, 10, 11, 13):
        first, second = opened(), opened()
        before = taken(first, number)
        second.load_state_dict(first.state_dict())
        assert before + taken(second, 25 - number) == whole
