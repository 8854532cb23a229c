"""Prompts as SkyRL's trainers take them: its data set, and the loaders for a step at a time and for single prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError, SnapshotError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from asyncdata.core.types import Sample
    from asyncdata.integrations.torch.views import LoaderOrderView

__all__ = ("AsyncPromptLoader", "PromptLoader", "Prompts", "prompt_of")


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


class _Loader:
    """What both loaders have in common.

    SkyRL only logs an error of loading, and begins with the first prompt again. So the error is kept, for
    :meth:`check_resumed`.
    """

    def __init__(self, view: LoaderOrderView, batch_size: int) -> None:
        self._view = view
        self._batch_size = batch_size
        self._problem: Exception | None = SnapshotError(
            "AD602 the checkpoint has no readable data.pt, and training would begin with the first prompt again: "
            "resume an older checkpoint by trainer.resume_mode=from_path, or use trainer.resume_mode=none"
        )

    def state_dict(self) -> dict[str, Any]:
        """The state after the last prompt."""
        return self._view.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the prompt that would have come next.

        :raises SnapshotError: if it is not the state of such a loader, or is of other data or settings.
        """
        try:
            self._load(state)
        except Exception as error:
            self._problem = error
            raise

        self._problem = None

    def _load(self, state: Mapping[str, Any]) -> None:
        self._view.load_state_dict(state)

    def check_resumed(self) -> None:
        """Raise what kept the state from being loaded.

        :raises SnapshotError: also if there was none.
        """
        if self._problem is not None:
            raise self._problem


class PromptLoader(_Loader):
    """Batches of prompts; the end of an epoch ends an iteration.

    SkyRL leaves out the short batch at an epoch's end: those prompts begin the next epoch. A state at the end of an
    epoch gives the next one, as SkyRL counts it by the steps.
    """

    def __init__(self, view: LoaderOrderView, batch_size: int) -> None:
        super().__init__(view, batch_size)
        self._next = 0

    def __len__(self) -> int:
        return len(self._view) // self._batch_size

    def __iter__(self) -> Iterator[list[Any]]:
        if not self._has_batch():
            self._next = 0
        while self._has_batch():
            found = self._view.__getitems__(range(self._next, self._next + self._batch_size))
            self._next += self._batch_size
            yield found

    def _has_batch(self) -> bool:
        return self._next + self._batch_size <= len(self._view)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last batch."""
        return {**super().state_dict(), "next_prompt": self._next}

    def _load(self, state: Mapping[str, Any]) -> None:
        super()._load({key: state[key] for key in state if key != "next_prompt"})
        self._next = state["next_prompt"]


class AsyncPromptLoader(_Loader):
    """Single prompts for SkyRL's generation workers, which end them in another order.

    The state has each prompt that was given out and neither trained on nor dropped: after a restart these are the next
    ones. So it needs no reading of what is over, as SkyRL's own does.
    """

    def __init__(self, view: LoaderOrderView, batch_size: int) -> None:
        super().__init__(view, batch_size)
        self._given: dict[str, Sample] = {}
        self.load_state_from_checkpoint(set())

    def __len__(self) -> int:
        return len(self._view)

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
