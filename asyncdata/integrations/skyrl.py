"""asyncdata under SkyRL's PPO and GRPO, synchronous and fully asynchronous.

On SkyRL's own command line::

    python -m skyrl.train.entrypoints.main_base trainer.override_entrypoint=asyncdata.integrations.skyrl
        asyncdata.num_workers=2 asyncdata.seed=1 ...

In an entry point of your own, ``PPOExp(cfg, num_workers=2, seed=1)`` in place of ``BasePPOExp(cfg)``. The state is in
``data.pt`` of SkyRL's checkpoints. ``uid`` is a prompt's place in the order, the same after a restart.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.core.extras import missing_package
from asyncdata.integrations.adapters import BatchesOfView, OfView, made_on_first_use, refuse
from asyncdata.integrations.torch.views import LoaderOrderView, view_of_rows
from asyncdata.sources.arrow.huggingface import HuggingFaceSource
from asyncdata.tokenization.functions.prompt import PromptRowFn

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from asyncdata.core.types import Sample

__all__ = (
    "AsyncPromptLoader",
    "FullyAsyncPPOTrainer",  # noqa: F822 - these three are made below, as they import SkyRL
    "PPOExp",  # noqa: F822
    "PPOTrainer",  # noqa: F822
    "PromptLoader",
    "Prompts",
    "main",
)

_FILES = {".json", ".jsonl", ".parquet"}
_KNOBS = "asyncdata."


def main() -> None:
    """The entry point that ``trainer.override_entrypoint`` names: SkyRL's, with the settings ``asyncdata.*``.

    :raises ConfigError: if SkyRL cannot be imported, or AD463, for a setting that cannot work.
    """
    try:
        import ray
        from omegaconf import OmegaConf
        from skyrl.train.config import SkyRLTrainConfig
        from skyrl.train.utils import validate_cfg
        from skyrl.train.utils.utils import initialize_ray
    except ImportError as error:
        raise missing_package("asyncdata.integrations.skyrl", "skyrl", error) from error

    words = [word for word in sys.argv[1:] if not word.startswith("trainer.override_entrypoint=")]
    given = OmegaConf.to_container(OmegaConf.from_cli([word for word in words if word.startswith(_KNOBS)]))
    cfg = SkyRLTrainConfig.from_cli_overrides([word for word in words if not word.startswith(_KNOBS)])
    validate_cfg(cfg)
    initialize_ray(cfg)
    knobs = given.get("asyncdata", {}) if isinstance(given, dict) else {}
    ray.get(ray.remote(num_cpus=1)(_train).remote(cfg, knobs))


def _train(cfg: Any, knobs: dict[str, Any]) -> None:
    """In a process of Ray."""
    _made("PPOExp")(cfg, **knobs).run()


class SkyRLExperiment:
    """SkyRL's ``BasePPOExp`` that reads the prompts of the training with a loader. Its evaluation stays SkyRL's.

    :param cfg: SkyRL's configuration.
    :param source: what a :class:`~asyncdata.DataLoader` reads; None: ``data.train_data``.
    :param rows_per_epoch: prompts of an epoch; None: all rows.
    :param drop_overlong: leave out prompts of more than ``trainer.max_prompt_length`` tokens, as SkyRL does.
    :param knobs: of the :class:`~asyncdata.DataLoader`. By default ``shuffle`` is ``"full"``, and ``seed`` is
        ``trainer.seed``.
    :raises ConfigError: AD463, for a setting that cannot work; it names it.
    """

    cfg: Any
    train_dataset: Any

    def __init__(
        self,
        cfg: Any,
        source: Any = None,
        *,
        rows_per_epoch: int | None = None,
        drop_overlong: bool = True,
        **knobs: Any,
    ) -> None:
        has_images = drop_overlong and cfg.generator.vision_language_generator
        given = {
            "trainer.fully_async.simulate_training": cfg.trainer.fully_async.simulate_training,
            "generator.vision_language_generator": has_images,
        }
        refuse(given, _REFUSED, "AD463 {name}=true{reason}")
        self._source = source
        self._drop_overlong = drop_overlong
        self._settings = {"seed": cfg.trainer.seed, "rows_per_epoch": rows_per_epoch, **knobs}
        super().__init__(cfg)  # type: ignore[call-arg]

    def get_train_dataset(self) -> Prompts:
        """The prompts of the training; called by the constructor."""
        trainer = self.cfg.trainer
        source = _source(self.cfg.data.train_data) if self._source is None else self._source
        commit = "on_ack" if trainer.fully_async.enabled else "on_delivery"
        settings = {**self._settings, "commit": commit}
        view = view_of_rows(LoaderOrderView, source, settings, item=prompt_of, tokenize_fn=self._tokenize_fn())
        if len(view) < trainer.train_batch_size:
            num_rows = len(view)
            view.close()
            raise ConfigError(
                f"AD463 an epoch has {num_rows} prompts, fewer than trainer.train_batch_size="
                f"{trainer.train_batch_size}, and no step could be made: use a smaller batch, or "
                "asyncdata.shuffle=true with a larger asyncdata.rows_per_epoch"
            )

        return Prompts(view)

    def _tokenize_fn(self) -> PromptRowFn | None:
        trainer = self.cfg.trainer
        if not self._drop_overlong:
            return None

        return PromptRowFn(
            trainer.policy.model.path,
            prompt_key="prompt",
            tool_key=None,
            metadata_key=None,
            apply_chat_template=True,
            max_length=trainer.max_prompt_length,
        )

    def get_trainer(self, **settings: Any) -> Any:
        """The trainer that ``trainer.fully_async.enabled`` asks for."""
        kind = "FullyAsyncPPOTrainer" if self.cfg.trainer.fully_async.enabled else "PPOTrainer"
        return _made(kind)(**settings)

    def run(self) -> None:
        """Train, and close the loader."""
        try:
            super().run()  # type: ignore[misc]
        finally:
            self.train_dataset.close()


_REFUSED = {
    "trainer.fully_async.simulate_training": (
        " has a trainer of its own, without checkpoints: leave it out, or use SkyRL's entry point for it"
    ),
    "generator.vision_language_generator": (
        ", and the tokens of a prompt with images are not counted: leave out what is too long once, in the files, and "
        "set asyncdata.drop_overlong=false"
    ),
}


def _source(names: Sequence[str]) -> Any:
    """What ``data.train_data`` names: files, or one data set of Hugging Face."""
    paths = [os.path.expanduser(name) for name in names]
    if all(Path(path).suffix.lower() in _FILES for path in paths):
        return paths

    if len(names) > 1:
        raise ConfigError(
            f"AD463 data.train_data={list(names)} has a data set of Hugging Face beside others: make one data set of "
            "them by datasets.concatenate_datasets, and pass it as PPOExp(cfg, source)"
        )

    name, _, split = names[0].partition(":")
    return HuggingFaceSource(name, split=split or "train")


class SkyRLTrainer:
    """SkyRL's trainer with a loader of prompts."""

    cfg: Any
    train_dataset: Any
    train_dataloader: Any
    total_training_steps: int | None

    def _build_train_dataloader_and_compute_training_steps(self) -> None:
        """SkyRL's hook for trainers with a loader of their own; called by the constructor."""
        steps = self._make_loader() * self.cfg.trainer.epochs
        limit = self.cfg.trainer.max_training_steps
        self.total_training_steps = steps if limit is None else min(steps, limit)

    def _make_loader(self) -> int:
        """Sets ``train_dataloader``, and gives the steps of an epoch."""
        self.train_dataloader = PromptLoader(self._view(), self.cfg.trainer.train_batch_size)
        return len(self.train_dataloader)

    def _view(self) -> LoaderOrderView:
        if not isinstance(self.train_dataset, Prompts):
            raise ConfigError(
                f"AD463 {type(self).__name__} was given the data set {type(self.train_dataset).__name__}: it needs "
                "that of asyncdata.integrations.skyrl.PPOExp"
            )

        return self.train_dataset.view

    def save_checkpoints(self) -> Any:
        """As SkyRL's, which would only log an error of the loader, and save without its state."""
        self.train_dataloader.state_dict()
        return super().save_checkpoints()  # type: ignore[misc]

    def load_checkpoints(self) -> Any:
        """As SkyRL's, which would only log an error of the loader, and begin with the first prompt again.

        :raises SnapshotError: for that error; AD602 where the checkpoint has no state of a loader.
        """
        found = super().load_checkpoints()  # type: ignore[misc]
        if found[0]:
            self.train_dataloader.check_resumed()
        return found

    def _remove_tail_data(self, entries: list[Any]) -> list[Any]:
        """As SkyRL's, which leaves out prompts that the data-parallel ranks cannot share equally.

        :raises ConfigError: AD463, if that would lose prompts.
        """
        kept: list[Any] = super()._remove_tail_data(entries)  # type: ignore[misc]
        if len(kept) < len(entries):
            raise ConfigError(
                f"AD463 SkyRL would leave out {len(entries) - len(kept)} of the {len(entries)} prompts of each batch, "
                "as its data-parallel ranks cannot share them equally: let trainer.train_batch_size * "
                "generator.n_samples_per_prompt be a multiple of the number of ranks"
            )

        return kept


class SkyRLAsyncTrainer(SkyRLTrainer):
    """SkyRL's fully asynchronous trainer with a loader of prompts."""

    mini_batch_size: int
    num_steps_per_epoch: int

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.async_train_dataloader = self.train_dataloader

    def _make_loader(self) -> int:
        self.train_dataloader = AsyncPromptLoader(self._view(), self.mini_batch_size)
        self.num_steps_per_epoch = len(self.train_dataloader) // self.mini_batch_size
        return self.num_steps_per_epoch


# What SkyRL's trainers take: a data set, and loaders for a step at a time and for single prompts


class Prompts:
    """What SkyRL's trainers take as their data set: prompts in the loader's order.

    :param view: gives dicts with ``prompt``, ``env_class``, ``env_extras`` and ``uid``.
    """

    def __init__(self, view: LoaderOrderView) -> None:
        self.view = view

    def __len__(self) -> int:
        return len(self.view)

    def __getitem__(self, index: int) -> Any:
        raise ConfigError(
            "AD463 a loader of SkyRL reads the prompts of PPOExp, and would shuffle them again: the trainer must be "
            "asyncdata.integrations.skyrl.PPOTrainer or FullyAsyncPPOTrainer, or a class of yours that inherits from it"
        )

    def __reduce__(self) -> Any:
        self[0]

    def collate_fn(self, items: list[Any]) -> list[Any]:
        """A batch is the list of its prompts."""
        return items

    def close(self) -> None:
        """Close the loader."""
        self.view.close()


class _Resumed(OfView):
    """A loader of prompts, and what kept its state from being loaded.

    SkyRL only logs that error, and begins with the first prompt again.
    """

    _problem: Exception | None = SnapshotError(
        "AD602 the checkpoint has no readable data.pt, and training would begin with the first prompt again: "
        "resume an older checkpoint by trainer.resume_mode=from_path, or use trainer.resume_mode=none"
    )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        try:
            super().load_state_dict(state)
        except Exception as error:
            self._problem = error
            raise

        self._problem = None

    def check_resumed(self) -> None:
        """Raise what kept the state from being loaded.

        :raises SnapshotError: also if there was none.
        """
        if self._problem is not None:
            raise self._problem


class PromptLoader(_Resumed, BatchesOfView):
    """Batches of prompts. A state at the end of an epoch gives the next one, as SkyRL counts it by the steps."""


class AsyncPromptLoader(_Resumed):
    """Single prompts for SkyRL's generation workers, which end them in another order.

    The state has each prompt that was given out and neither trained on nor dropped: after a restart these are the next
    ones. So it needs no reading of what is over, as SkyRL's own does.
    """

    def __init__(self, view: LoaderOrderView, batch_size: int) -> None:
        self._view = view
        self._batch_size = batch_size
        self._given: dict[str, Sample] = {}
        self.load_state_from_checkpoint(set())

    def __iter__(self) -> Iterator[Any]:
        """Nothing: the constructor of SkyRL's trainer iterates, and its prompts come from the method below."""
        return iter(())

    def load_state_from_checkpoint(self, consumed: set[str], filtered: set[str] | None = None) -> None:
        """The prompts that this epoch of SkyRL has trained on or dropped, and those dropped."""
        self._consumed = set(consumed)
        self._filtered = set(filtered or ())
        self._num_left = len(self._view) // self._batch_size * self._batch_size - len(self._consumed)

    async def reset_at_epoch_end(self) -> None:
        """Begin the next epoch, with the prompts that come next."""
        self.load_state_from_checkpoint(set())

    async def get_next_non_consumed_data(self) -> list[Any] | None:
        """A batch of one prompt; None at the end of an epoch."""
        if self._num_left <= 0:
            return None

        (sample,) = self._view.loader.get_next_batch(1)
        self._num_left -= 1
        prompt = prompt_of(sample)
        self._given[prompt["uid"]] = sample
        return [prompt]

    async def mark_consumed_uids(self, uids: Iterable[str]) -> None:
        """These were trained on."""
        ended = list(uids)
        self._view.loader.ack([self._given.pop(uid) for uid in ended])
        self._consumed.update(ended)

    async def mark_filtered_uids(self, uids: Iterable[str]) -> None:
        """These were dropped: they do not come again."""
        ended = list(uids)
        await self.mark_consumed_uids(ended)
        self._filtered.update(ended)

    def get_consumed_uids_list(self) -> list[str]:
        """What this epoch has trained on or dropped."""
        return list(self._consumed)

    def get_filtered_uids_list(self) -> list[str]:
        """What this epoch has dropped."""
        return list(self._filtered)

    def num_trained(self) -> int:
        """The number of prompts that this epoch has trained on."""
        return len(self._consumed) - len(self._filtered)


def prompt_of(sample: Sample) -> dict[str, Any]:
    """What SkyRL's ``PromptDataset`` and its collate function make of a row; ``uid`` is its place in the order."""
    extras = dict(sample.extra)
    prompt, env_class = extras.pop("prompt"), extras.pop("env_class", None)
    return {"prompt": prompt, "env_class": env_class, "env_extras": extras, "uid": str(sample.position)}


__getattr__ = _made = made_on_first_use(
    __name__,
    "skyrl",
    {
        "FullyAsyncPPOTrainer": (SkyRLAsyncTrainer, "skyrl.train.fully_async_trainer:FullyAsyncRayPPOTrainer"),
        "PPOExp": (SkyRLExperiment, "skyrl.train.entrypoints.main_base:BasePPOExp"),
        "PPOTrainer": (SkyRLTrainer, "skyrl.train.trainer:RayPPOTrainer"),
    },
)
