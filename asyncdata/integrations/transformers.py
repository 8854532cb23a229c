"""asyncdata under the ``Trainer`` of transformers and its relatives: TRL, axolotl, ms-swift, LLaMA-Factory.

::

    trainer = SFTTrainer(model, args=SFTConfig(max_steps=1000, ...), train_dataset=placeholder())
    attach(trainer, DataLoader("chats.jsonl", tokenize_fn=..., collate_fn=..., batch_size=8, ranks=ranks()))
    trainer.train(resume_from_checkpoint=True)

The trainer's checkpoints (``trainer_state.json``) then have the loader's state. A resumed training continues with
exactly the batch that would have come next, and reads none to skip it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError, EndOfData, SnapshotError
from asyncdata.core.extras import missing_package
from asyncdata.integrations.torch.loader import StatefulDataLoader, over_all_epochs
from asyncdata.integrations.torch.state import from_torch_state, to_torch_state
from asyncdata.integrations.torch.views import row_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from asyncdata.core.types import Sample
    from asyncdata.loader.loader import DataLoader

__all__ = ("attach", "placeholder")

_CALLBACK = "AsyncDataState"  # the state's key in trainer_state.json


def placeholder() -> Any:
    """A ``datasets.Dataset`` of one row, for trainers whose constructor demands a ``train_dataset``. It is never read.

    SFTTrainer takes it with ``dataset_kwargs={"skip_prepare_dataset": True}``; DPOTrainer and RewardTrainer as it is.
    """
    try:
        from datasets import Dataset
    except ImportError as error:
        raise missing_package("placeholder", "datasets", error) from error

    text = {name: [""] for name in ("prompt", "chosen", "rejected")}
    return Dataset.from_dict({**text, "input_ids": [[0]], "labels": [[0]]})


def attach(
    trainer: Any,
    loader: DataLoader | StatefulDataLoader,
    *,
    item: Callable[[Sample], Any] = row_of,
    starts_new: bool = False,
) -> None:
    """Make ``trainer`` train on the batches of ``loader``, and keep the loader's state in its checkpoints.

    For a ``Trainer`` or a subclass whose batches are tensors (SFT, DPO, rewards), a batch is what the loader's
    ``collate_fn`` makes; each rank has its own loader, with ``ranks=ranks()``. For a trainer that samples groups (GRPO,
    RLOO: it has ``num_generations``), a batch is a list of rows, repeated as TRL's ``RepeatSampler`` does it; the
    loader is one of :class:`~asyncdata.RowFn`, the same on every rank (``world_size=1``), without ``batch_size``.

    :param trainer: its arguments must have ``max_steps``, as a loader has no length.
    :param loader: used through the trainer alone from now on; closing it is up to the caller.
    :param item: for GRPO: makes the row that reward functions see from a sample; it must have the key ``prompt``.
    :param starts_new: resume also from a checkpoint without a loader's state; the loader then continues from where it
        is. False refuses such a checkpoint.
    :raises ConfigError: for arguments that cannot work; it names them.
    """
    try:
        from transformers.trainer_callback import ExportableState, TrainerCallback
    except ImportError as error:
        raise missing_package("attach", "transformers", error) from error

    args = trainer.args
    if args.max_steps <= 0:
        raise ConfigError(
            "the trainer's arguments have no max_steps, and a loader has no length: pass max_steps=. For n epochs of m "
            "rows it is n * m // (batch size of all ranks * gradient_accumulation_steps)"
        )

    if getattr(args, "precompute_ref_log_probs", False):
        raise ConfigError(
            "precompute_ref_log_probs computes the reference's log-probabilities of the trainer's own dataset, which "
            "is not read: leave it out"
        )

    batches = _batches_of(trainer, loader, item)
    args.ignore_data_skip = True  # the loader's state does that, without reading
    trainer.get_train_dataloader = lambda: batches
    # A class of its own: transformers makes the callback again from its class, and that must find the same batches.
    kind = type(
        _CALLBACK, (_StateCallback, TrainerCallback, ExportableState), {"batches": batches, "starts_new": starts_new}
    )
    trainer.remove_callback(_callback_of(trainer))
    trainer.add_callback(kind())


def _callback_of(trainer: Any) -> Any:
    """The callback of an earlier call, which this one replaces."""
    found = [type(callback) for callback in trainer.callback_handler.callbacks if isinstance(callback, _StateCallback)]
    return found[0] if found else _StateCallback


def _batches_of(trainer: Any, loader: DataLoader | StatefulDataLoader, item: Callable[[Sample], Any]) -> Any:
    args = trainer.args
    is_grouped = hasattr(trainer, "num_generations") and hasattr(args, "generation_batch_size")
    config = loader.config
    if is_grouped:
        if isinstance(loader, StatefulDataLoader) or config.ranks.world_size != 1 or config.n_samples_per_prompt != 1:
            raise ConfigError(
                f"{type(trainer).__name__} repeats prompts and shares them out itself: pass a DataLoader of single "
                "rows (RowFn), with world_size=1 and without n_samples_per_prompt"
            )

        return _RepeatedPrompts(trainer, loader, item)

    given = config.ranks
    if (given.world_size, given.rank) != (args.world_size, args.process_index):
        raise ConfigError(
            f"the loader is rank {given.rank} of {given.world_size}, and the trainer rank {args.process_index} of "
            f"{args.world_size}: pass ranks=asyncdata.integrations.torch.ranks() to the loader"
        )

    return _Batches(loader if isinstance(loader, StatefulDataLoader) else StatefulDataLoader(loader))


class _StateCallback:
    """Puts the loader's state into the trainer's checkpoints, and back."""

    batches: Any
    starts_new: bool

    def state(self) -> dict[str, Any]:
        """What transformers writes to ``trainer_state.json``."""
        return {"args": {}, "attributes": {"saved": self.batches.state_dict()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the state of the checkpoint that the trainer has just loaded."""
        found = state.stateful_callbacks.get(_CALLBACK)
        if found is not None:
            saved = found[-1] if isinstance(found, list) else found
            self.batches.load_state_dict(saved["attributes"]["saved"])
        elif state.global_step and not self.starts_new:
            raise SnapshotError(
                f"AD602 the checkpoint of step {state.global_step} has no state of a loader: it was saved before "
                "attach(). Resume from one that has it, or pass starts_new=True: then the data continue from where the "
                "loader is now"
            )

        state.stateful_callbacks.setdefault(_CALLBACK, self.state())


class _Batches:
    """The batches of a loader, epoch after epoch, as tensors. It has no length, no ``dataset`` and no ``set_epoch``."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        return over_all_epochs(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state)


class _RepeatedPrompts:
    """Batches of a trainer that samples several completions of a prompt, in the layout of TRL's ``RepeatSampler``.

    A *generation batch* has ``generation_batch_size / num_generations`` prompts, each ``num_generations`` times in a
    row. Each rank has its part of that list, as often as the trainer uses it: ``num_iterations *
    steps_per_generation`` times. The state counts how often it was used, so that a checkpoint between two
    generation batches, or within one, continues with the same prompts.
    """

    def __init__(self, trainer: Any, loader: DataLoader, item: Callable[[Sample], Any]) -> None:
        args = trainer.args
        self._trainer = trainer
        self._loader = loader
        self._item = item
        self._num_generations = trainer.num_generations
        self._num_prompts = args.generation_batch_size // trainer.num_generations
        self._num_repeats = getattr(trainer, "num_iterations", 1) * args.steps_per_generation
        size = args.generation_batch_size // args.world_size
        self._part = slice(args.process_index * size, (args.process_index + 1) * size)
        self._before: dict[str, Any] | None = None
        self._num_used = 0

    def __iter__(self) -> Iterator[list[Any]]:
        while True:
            before = self._loader.state_dict()
            try:
                samples = self._loader.get_next_batch(self._num_prompts)
            except EndOfData:
                return

            rows = [sample for sample in samples for _ in range(self._num_generations)][self._part]
            self._before = before
            while self._num_used < self._num_repeats:
                self._num_used += 1
                yield list(map(self._item, rows))
            self._before, self._num_used = None, 0

    def state_dict(self) -> dict[str, Any]:
        """The state before the present generation batch, and how often that was used."""
        if self._before is None or self._num_used >= self._num_repeats:
            return {**to_torch_state(self._loader.state_dict()), "num_used": 0}

        return {**to_torch_state(self._before), "num_used": self._num_used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(from_torch_state({key: state[key] for key in state if key != "num_used"}))
        self._before, self._num_used = None, state["num_used"]
        if hasattr(self._trainer, "_step"):  # TRL samples completions where it is a multiple: not yet, in mid-block
            self._trainer._step = self._num_used  # noqa: SLF001 - nothing public tells it
