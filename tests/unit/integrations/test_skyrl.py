"""What the adapter of SkyRL refuses, and its loader for generation workers. SkyRL itself is not needed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import pickle
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import asyncdata.integrations.skyrl
from asyncdata import ConfigError, SnapshotError
from asyncdata.integrations.skyrl import SkyRLExperiment, SkyRLTrainer, main
from asyncdata.integrations.skyrl_prompts import AsyncPromptLoader, PromptLoader, Prompts, prompt_of
from asyncdata.integrations.torch.rows import order_view_of_rows

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ROWS = 10


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": [{"role": "user", "content": str(n)}], "number": n}) + "\n" for n in range(ROWS))
    )
    return path


class _Base:
    """As much of SkyRL's experiment as ours calls."""

    def __init__(self, cfg: Any) -> None:
        self.cfg = cfg
        self.train_dataset = self.get_train_dataset()  # type: ignore[attr-defined]


def experiment(cfg: Any, source: Any = None, **knobs: Any) -> Any:
    return type("Experiment", (SkyRLExperiment, _Base), {})(cfg, source, **{"num_workers": 0, "timeout_s": 240} | knobs)


def settings(train_data: list[str], **changes: Any) -> Any:
    fully_async = SimpleNamespace(
        enabled=changes.pop("is_async", False), simulate_training=changes.pop("simulated", False)
    )
    generator = SimpleNamespace(vision_language_generator=changes.pop("has_images", False))
    trainer = {"seed": 1, "train_batch_size": 4, "max_prompt_length": 512, "fully_async": fully_async, **changes}
    return SimpleNamespace(
        data=SimpleNamespace(train_data=train_data), generator=generator, trainer=SimpleNamespace(**trainer)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"simulated": True}, r"AD463 trainer.fully_async.simulate_training=true .*: leave it out"),
        ({"has_images": True}, r"AD463 generator.vision_language_generator=true.* set asyncdata.drop_overlong=false"),
    ],
)
def test_a_setting_that_cannot_work_is_refused(rows: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        experiment(settings([str(rows)], **changes))


def test_an_epoch_without_a_batch_is_refused(rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"AD463 an epoch has 10 prompts, fewer than trainer.train_batch_size=11"):
        experiment(settings([str(rows)], train_batch_size=11), drop_overlong=False)


def test_a_data_set_of_hugging_face_beside_others_is_refused(rows: Path) -> None:
    with pytest.raises(ConfigError, match=r"AD463 data.train_data=.* has a data set of Hugging Face beside others"):
        experiment(settings([str(rows), "openai/gsm8k"]), drop_overlong=False)


def test_a_trainer_with_another_data_set_is_refused() -> None:
    trainer = SkyRLTrainer()
    trainer.train_dataset = []

    with pytest.raises(ConfigError, match=r"AD463 SkyRLTrainer was given the data set list: it needs that of .*PPOExp"):
        trainer._build_train_dataloader_and_compute_training_steps()  # noqa: SLF001 - SkyRL calls it


def test_a_loader_of_skyrl_over_our_prompts_is_refused(rows: Path) -> None:
    made = experiment(settings([str(rows)]), drop_overlong=False)
    with contextlib.closing(made.train_dataset) as prompts:
        with pytest.raises(ConfigError, match="AD463 a loader of SkyRL reads the prompts of PPOExp"):
            _ = prompts[0]
        with pytest.raises(ConfigError, match="AD463 a loader of SkyRL reads the prompts of PPOExp"):
            pickle.dumps(prompts)  # as torch does for its workers


def test_a_batch_that_skyrl_would_shorten_is_refused() -> None:
    class Base:
        def _remove_tail_data(self, entries: list[Any]) -> list[Any]:
            return entries[: len(entries) // 3 * 3]

    trainer = type("Trainer", (SkyRLTrainer, Base), {})()

    shortened = trainer._remove_tail_data  # noqa: SLF001 - SkyRL calls it
    assert shortened([1, 2, 3]) == [1, 2, 3]
    with pytest.raises(ConfigError, match="AD463 SkyRL would leave out 1 of the 4 prompts of each batch"):
        shortened([1, 2, 3, 4])


def test_a_checkpoint_is_not_written_without_the_state_of_the_loader() -> None:
    class Base:
        def save_checkpoints(self) -> str:
            raise AssertionError("SkyRL has saved")

    trainer = type("Trainer", (SkyRLTrainer, Base), {})()
    trainer.train_dataloader = SimpleNamespace(state_dict=lambda: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        trainer.save_checkpoints()


@pytest.mark.parametrize("name", ["PPOExp", "PPOTrainer", "FullyAsyncPPOTrainer"])
def test_a_missing_skyrl_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "skyrl", None)

    with pytest.raises(ConfigError, match=f"{name} needs skyrl"):
        getattr(asyncdata.integrations.skyrl, name)


def test_a_missing_skyrl_is_named_by_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("skyrl", "ray"):
        monkeypatch.setitem(sys.modules, name, None)

    with pytest.raises(ConfigError, match=r"asyncdata.integrations.skyrl needs skyrl"):
        main()


# The loaders.


@pytest.fixture
def opened(rows: Path) -> Iterator[Any]:
    """Loaders over the rows, closed after the test."""
    with contextlib.ExitStack() as stack:

        def opens(kind: Any, batch: int, **knobs: Any) -> Any:
            found = {"num_workers": 0, "timeout_s": 240, "commit": "on_ack", **knobs}
            view = order_view_of_rows(str(rows), found, item=prompt_of)
            return kind(stack.enter_context(contextlib.closing(view)), batch)

        yield opens


def numbers(batches: Any) -> list[int]:
    return [prompt["env_extras"]["number"] for batch in batches for prompt in batch]


async def take(loader: Any, number: int) -> list[Any]:
    return [await loader.get_next_non_consumed_data() for _ in range(number)]


def uids(batches: list[Any]) -> list[str]:
    return [prompt["uid"] for batch in batches for prompt in batch]


def test_a_prompt_has_skyrls_fields_and_its_place_as_uid(opened: Any) -> None:
    (prompt,) = next(iter(opened(PromptLoader, 1, shuffle=False)))

    assert prompt == {
        "prompt": [{"role": "user", "content": "0"}],
        "env_class": None,
        "env_extras": {"number": 0},
        "uid": "0:0:0",
    }


def test_prompts_that_were_given_out_and_not_trained_on_come_first_after_a_restart(opened: Any) -> None:
    async def start() -> Any:
        loader = opened(AsyncPromptLoader, 3)
        given = await take(loader, 7)
        trained, dropped = [given[0], given[2], given[5]], [given[3]]
        await loader.mark_consumed_uids(uids(trained))
        await loader.mark_filtered_uids(uids(dropped))
        assert loader.num_trained() == 3
        return given, loader.state_dict(), loader.get_consumed_uids_list(), loader.get_filtered_uids_list()

    given, state, consumed, filtered = asyncio.run(start())
    assert sorted(consumed) == sorted(uids([given[place] for place in (0, 2, 3, 5)]))
    assert filtered == uids([given[3]])

    async def resume() -> Any:
        loader = opened(AsyncPromptLoader, 3)
        loader.load_state_dict(state)
        loader.check_resumed()
        loader.load_state_from_checkpoint(set(consumed), set(filtered))
        rest = await take(loader, 6)
        assert loader.num_trained() == 3
        return rest

    rest = asyncio.run(resume())
    assert rest[:3] == [given[1], given[4], given[6]]
    assert rest[5] is None, "nine prompts are an epoch of three batches, and four are over"
    assert len({*uids(rest[:5]), *consumed}) == 9


def test_the_next_epoch_begins_with_the_prompts_that_the_last_one_left_out(opened: Any) -> None:
    async def epochs() -> list[list[int]]:
        loader = opened(AsyncPromptLoader, 4)
        found = []
        for _ in range(2):
            given = await take(loader, 8)
            assert await loader.get_next_non_consumed_data() is None
            await loader.mark_consumed_uids(uids(given))
            await loader.reset_at_epoch_end()
            found.append(numbers(given))
        return found

    first, second = asyncio.run(epochs())
    assert sorted(first + second[:2]) == list(range(ROWS))


def test_a_batch_size_may_change_at_a_restart(opened: Any) -> None:
    first = opened(PromptLoader, 3, commit="on_delivery")
    whole = numbers(opened(PromptLoader, 1, commit="on_delivery"))
    batches = iter(first)
    taken = numbers([next(batches), next(batches)])

    second = opened(PromptLoader, 2, commit="on_delivery")
    second.load_state_dict(first.state_dict())

    assert taken + numbers(second) == whole


@pytest.mark.parametrize("kind", [PromptLoader, AsyncPromptLoader])
def test_an_error_of_loading_is_kept_as_skyrl_only_logs_it(opened: Any, kind: type) -> None:
    loader = opened(kind, 2)
    with pytest.raises(SnapshotError, match="AD602 the checkpoint has no readable data.pt"):
        loader.check_resumed()

    with pytest.raises(SnapshotError, match="AD602 this is not the state of a view"):
        loader.load_state_dict({"_iterator_finished": False})

    with pytest.raises(SnapshotError, match="AD602 this is not the state of a view"):
        loader.check_resumed()


def test_skyrl_may_ask_for_the_length_and_a_collate_function(opened: Any) -> None:
    prompts = opened(lambda view, _: Prompts(view), 2)

    assert len(prompts) == ROWS
    assert prompts.collate_fn([1, 2]) == [1, 2]
