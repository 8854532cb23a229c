"""asyncdata under the ``Trainer`` of transformers and its relatives, such as TRL, ms-swift and LLaMA-Factory.

::

    trainer = SFTTrainer(model, args=SFTConfig(max_steps=1000, ...), train_dataset=placeholder(), ...)
    attach(trainer, DataLoader("chats.jsonl", tokenize_fn=..., collate_fn=..., batch_size=8, ranks=ranks()))
    trainer.train(resume_from_checkpoint=True)

The trainer's checkpoints (``trainer_state.json``) then have the loader's state. A resumed training continues with
exactly the batch that would have come next, and reads none to skip it.
"""

from __future__ import annotations

import io
import json
import math
import re
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from asyncdata.core.errors import ConfigError, EndOfData, SnapshotError, get_logger
from asyncdata.core.settings import needing
from asyncdata.integrations.adapters import RUN_WITH, need
from asyncdata.integrations.torch.datasets import row_of
from asyncdata.integrations.torch.loader import StatefulDataLoader, over_all_epochs
from asyncdata.integrations.torch.process import from_torch_state, refuse_async, to_torch_state
from asyncdata.loader.measurements import epochs_of
from asyncdata.order.shuffle import RowShuffle

if TYPE_CHECKING:
    from asyncdata.core.types import Sample
    from asyncdata.loader.loader import DataLoader

    Loader = DataLoader | StatefulDataLoader

__all__ = ("attach", "placeholder", "row_with_pictures")

_log = get_logger(__name__)
_PLACEHOLDER = "a placeholder of asyncdata"
_STATE = "trainer_state.json"  # the file of a checkpoint that transformers writes last
_NUMBERED = re.compile(r"checkpoint-(\d+)")

CALLBACK = "AsyncDataState"
"""The key of a loader's state in ``trainer_state.json``."""


def placeholder() -> Any:
    """A ``datasets.Dataset`` of one row, for a trainer whose constructor demands a data set to train or evaluate on.

    It is never read. It has what SFTTrainer, DPOTrainer, KTOTrainer and RewardTrainer look for.
    """
    with needing("placeholder", "datasets"):
        from datasets import Dataset, DatasetInfo

    text = {name: [""] for name in ("prompt", "chosen", "rejected")}
    row = {**text, "input_ids": [[0]], "labels": [[0]]}
    return Dataset.from_dict(row, info=DatasetInfo(description=_PLACEHOLDER))


def attach(
    trainer: Any,
    loader: Loader,
    *,
    eval_loader: Loader | Mapping[str, Loader] | None = None,
    batches_per_epoch: int | Literal["count"] | None = None,
    item: Callable[[Sample], Any] | None = None,
    starts_new: bool = False,
) -> None:
    """Make ``trainer`` train on the batches of ``loader``, and keep the loader's state in its checkpoints.

    Its log has the loader's :meth:`~asyncdata.DataLoader.metrics` beside the loss, and ``epoch`` is that of the data.

    For a ``Trainer`` or a subclass whose batches are tensors (SFT, DPO, rewards), a batch is what the loader's
    ``collate_fn`` makes; each rank has its own loader, with ``ranks=ranks()``. For a trainer that samples groups (GRPO,
    RLOO: it has ``num_generations``), a batch is a list of rows, repeated as TRL's ``RepeatSampler`` does it; the
    loader is one of :class:`~asyncdata.RowFn`, the same on every rank (``world_size=1``), without ``batch_size``.

    :param trainer: its arguments have ``max_steps``, or ``num_train_epochs`` with a known length of an epoch.
    :param loader: used through the trainer alone from now on; closing it is up to the caller.
    :param eval_loader: the trainer evaluates on one epoch of this one: each time on the same batches, from where it is
        now. Or several by name: a loss is then ``eval_<name>_loss``; named ones of the trainer's ``eval_dataset`` are
        evaluated too. Not for trainers that sample groups.
    :param batches_per_epoch: the batches that one rank has in an epoch, for ``num_train_epochs``. ``"count"`` counts
        those of the first epoch when the training begins, by making them all. None: they are known for
        ``shuffle="full"`` of :class:`~asyncdata.RowFn` and for ``RowShuffle(only_kept=True)``, without packing.
    :param item: for GRPO: makes the row that reward functions see from a sample; it must have the key ``prompt``.
        None: :func:`row_with_pictures`.
    :param starts_new: resume also from a checkpoint without a loader's state; the loader then continues from where it
        is. False refuses such a checkpoint.
    :raises ConfigError: for arguments that cannot work; it names them.
    """
    with needing("attach", "transformers"):
        from transformers.trainer_callback import ExportableState, TrainerCallback

    refuse_async(loader, "attach")
    args = trainer.args
    if getattr(args, "precompute_ref_log_probs", False):
        raise ConfigError(
            "precompute_ref_log_probs computes the reference's log-probabilities of the trainer's own dataset, which "
            "is not read: leave it out"
        )

    batches = _batches_of(trainer, loader, item or row_with_pictures)
    has_epochs = args.max_steps <= 0 or batches_per_epoch is not None
    epochs = _Epochs(batches, batches_per_epoch, args) if has_epochs else None
    evaluated = dict(eval_loader) if isinstance(eval_loader, Mapping) else {None: eval_loader}
    if any(one is loader for one in evaluated.values()):
        raise ConfigError("AD642 eval_loader is the loader of the training: evaluating would move it; make another one")

    _attach_evaluation(trainer, {name: one for name, one in evaluated.items() if one is not None})
    args.ignore_data_skip = True  # the loader's state does that, without reading
    for name in ("train", "log", "get_train_dataloader", "get_eval_dataloader"):
        need(trainer, name)
    trainer.get_train_dataloader = lambda: batches
    # A class of its own: transformers makes the callback again from its class, and that must find the same batches.
    found = {"batches": batches, "epochs": epochs, "starts_new": starts_new}
    kind = type(CALLBACK, (_StateCallback, TrainerCallback, ExportableState), found)
    trainer.remove_callback(_callback_of(trainer))
    trainer.add_callback(kind())

    def train(resume_from_checkpoint: Any = None, *more: Any, **named: Any) -> Any:
        checkpoint = _saved_whole(resume_from_checkpoint, args.output_dir)
        if epochs is not None:
            num_steps = epochs.num_steps(checkpoint)
            args.max_steps = args.max_steps if args.max_steps > 0 else num_steps
        return type(trainer).train(trainer, checkpoint, *more, **named)

    trainer.train = train

    def log(logs: dict[str, float], *more: Any, **named: Any) -> None:
        if "loss" in logs:
            logs |= batches.loader.metrics()
        type(trainer).log(trainer, logs, *more, **named)

    trainer.log = log


def row_with_pictures(sample: Sample) -> Any:
    """The row of a sample, as TRL takes it: pictures of Hugging Face's feature ``Image``, ``{"bytes": ..., "path":
    ...}``, in ``image`` or ``images`` are those of PIL, turned as their EXIF data say. Paths stay as they are.
    """
    row = row_of(sample)
    if row is sample:
        return row

    try:
        return {**row, **{name: _pictures(row[name]) for name in ("image", "images") if row.get(name)}}
    except Exception as error:
        error.add_note(f"a picture of {sample.source} cannot be opened; leave out such rows before the training")
        raise


def _pictures(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_pictures, value))

    if not isinstance(value, dict) or not value.keys() <= {"bytes", "path"}:
        return value

    from PIL import Image, ImageOps

    data = value.get("bytes")  # base64, as rows are JSON on their way
    return ImageOps.exif_transpose(Image.open(value["path"] if data is None else io.BytesIO(b64decode(data))))


def _callback_of(trainer: Any) -> Any:
    """The callback of an earlier call, which this one replaces."""
    callbacks = need(need(trainer, "callback_handler"), "callbacks")
    found = [type(callback) for callback in callbacks if isinstance(callback, _StateCallback)]
    return found[0] if found else _StateCallback


def _batches_of(trainer: Any, loader: DataLoader[Any, Any] | StatefulDataLoader, item: Callable[[Sample], Any]) -> Any:
    if _is_grouped(trainer):
        config = loader.config
        if _data_parallel(trainer)[1] != trainer.args.world_size:
            raise ConfigError(
                f"{type(trainer).__name__} shares prompts out to all processes, and tensor or context parallelism "
                "gives some of them the same ones: leave out its tp_size and cp_size"
            )

        if isinstance(loader, StatefulDataLoader) or config.ranks.world_size != 1 or config.n_samples_per_prompt != 1:
            raise ConfigError(
                f"{type(trainer).__name__} repeats prompts and shares them out itself: pass a DataLoader of single "
                "rows (RowFn), with world_size=1 and without n_samples_per_prompt"
            )

        return _RepeatedPrompts(trainer, loader, item)

    return _Batches(_of_this_rank(trainer, loader))


def _is_grouped(trainer: Any) -> bool:
    return hasattr(trainer, "num_generations") and hasattr(trainer.args, "generation_batch_size")


def _of_this_rank(trainer: Any, loader: DataLoader[Any, Any] | StatefulDataLoader) -> StatefulDataLoader:
    given, (rank, world_size) = loader.config.ranks, _data_parallel(trainer)
    if (given.rank, given.world_size) != (rank, world_size):
        raise ConfigError(
            f"the loader is rank {given.rank} of {given.world_size}, and the trainer rank {rank} of {world_size}: pass "
            "ranks=asyncdata.integrations.torch.ranks() to the loader, made after the trainer, or "
            f"Ranks(rank={rank}, world_size={world_size})"
        )

    made = loader if isinstance(loader, StatefulDataLoader) else StatefulDataLoader(loader)
    if made.is_packed and _parallelism(trainer, "cp_size") > 1:
        raise ConfigError(
            "the trainer has context parallelism, which keeps no boundaries in a sequence: the documents of a pack "
            "would attend to each other. Leave out packing=, or set cp_size=1"
        )

    return made


def _data_parallel(trainer: Any) -> tuple[int, int]:
    """The trainer's data-parallel rank, and their number. Successive processes of tensor and context parallelism get
    the same data. Up to transformers 5.10 a trainer does not know the tensor parallelism of accelerate.
    """
    tp, cp, sp = (_parallelism(trainer, name) for name in ("tp_size", "cp_size", "sp_size"))
    if sp > 1:
        raise ConfigError(
            f"the trainer has sequence parallelism (sp_size={sp}): it holds batches that it has not trained on, which "
            "no checkpoint would have. Set cp_size in place of sp_size"
        )

    return trainer.args.process_index // (tp * cp), trainer.args.world_size // (tp * cp)


def _parallelism(trainer: Any, name: str) -> int:
    of_accelerate = getattr(getattr(trainer, "accelerator", None), "parallelism_config", None)
    return max(getattr(trainer, f"get_{name}", lambda: 1)(), getattr(of_accelerate, name, 1))


def _attach_evaluation(trainer: Any, loaders: Mapping[str | None, Loader]) -> None:
    """Have the trainer evaluate on these, by name; None is the only one."""
    own = getattr(trainer, "eval_dataset", None)
    if loaders and (_is_grouped(trainer) or (isinstance(own, dict) and None in loaders)):
        raise ConfigError(
            "AD642 eval_loader= is one set of batches; a trainer that samples groups evaluates on its own rows: pass "
            "them to it as eval_dataset=. To one that has several sets by name, pass eval_loader={name: loader}"
        )

    for name, data in (own if isinstance(own, dict) else {None: own}).items():
        given = "eval_dataset" if name is None else f"eval_dataset[{name!r}]"
        is_replaced = name in loaders or (name is None and bool(loaders))
        if getattr(getattr(data, "info", None), "description", None) == _PLACEHOLDER:
            if not is_replaced:
                raise ConfigError(f"AD642 the trainer's {given} is a placeholder: pass eval_loader= to attach, too")
        elif is_replaced and data is not None and not isinstance(data, _Evaluation):
            raise ConfigError(
                f"AD642 the trainer's {given} would not be evaluated, as eval_loader= takes its place: pass "
                f"placeholder() there, or both under names of their own: eval_dataset={{name: data}} to the trainer, "
                "and eval_loader={another: loader} to attach"
            )

    if not loaders:
        return

    evaluated = {name: _Evaluation(_of_this_rank(trainer, loader)) for name, loader in loaders.items()}
    if None not in loaders:
        trainer.eval_dataset = {**(own if isinstance(own, dict) else {}), **evaluated}

    def get(eval_dataset: Any = None) -> Any:
        name = None if eval_dataset is trainer.eval_dataset else eval_dataset
        found = evaluated.get(name) if name is None or isinstance(name, str) else None
        return found or type(trainer).get_eval_dataloader(trainer, eval_dataset)

    trainer.get_eval_dataloader = get


class _Evaluation:
    """The batches of one epoch, the same ones in each loop."""

    def __init__(self, loader: StatefulDataLoader) -> None:
        self._loader = loader
        self._start = loader.state_dict()

    def __iter__(self) -> Iterator[Any]:
        self._loader.load_state_dict(self._start)
        return iter(self._loader)


class _StateCallback:
    """Puts the loader's state into the trainer's checkpoints, and back."""

    batches: Any
    epochs: _Epochs | None
    starts_new: bool
    is_asked = False

    def state(self) -> dict[str, Any]:
        """What transformers writes to ``trainer_state.json``."""
        self.is_asked = True
        known = {} if self.epochs is None else {"num_batches": self.epochs.num_batches}
        return {"args": {}, "attributes": {"saved": self.batches.state_dict(), **known}}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the epochs, as a trainer without a length of its data does not."""
        if self.epochs is None:
            state.epoch = self.batches.progress
        else:
            self.epochs.follow(state, control)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Restore the state of the checkpoint that the trainer has just loaded."""
        found = state.stateful_callbacks.get(CALLBACK)
        if found is not None:
            saved = found[-1] if isinstance(found, list) else found
            self.batches.load_state_dict(saved["attributes"]["saved"])
        elif state.global_step and not self.starts_new:
            raise SnapshotError(
                f"AD602 the checkpoint of step {state.global_step} has no state of a loader: it was saved before "
                "attach(). Resume from one that has it, or pass starts_new=True: then the data continue from where the "
                "loader is now"
            )

        state.stateful_callbacks.setdefault(CALLBACK, self.state())
        self.is_asked = False
        # transformers would train one step more, as it looks after a step whether it was the last.
        self.batches.is_over = state.global_step >= args.max_steps

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse a version of transformers that has saved a checkpoint without asking for the state."""
        if args.should_save and not self.is_asked:
            raise ConfigError(
                f"AD644 this version of transformers has saved step {state.global_step} without the loader's state: "
                f"asyncdata was run with transformers {RUN_WITH['transformers']}. Install that version, or a newer "
                "asyncdata"
            )

        self.is_asked = False


class _Batches:
    """The batches of a loader, epoch after epoch, as tensors. It has no length, no ``dataset`` and no ``set_epoch``."""

    is_over = False  # True: a checkpoint of the last step was resumed

    def __init__(self, loader: StatefulDataLoader) -> None:
        order = loader.config.order
        self.loader = loader
        self.is_counted = not loader.is_packed and isinstance(order, RowShuffle) and order.only_kept
        self.can_count = True

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if self.is_over else over_all_epochs(self.loader)

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(state)

    @property
    def progress(self) -> float:
        """Epochs that the trainer has had."""
        return self.loader.progress

    def num_batches(self) -> int:
        """The batches of an epoch; if their number is not known, by making them. The loader is then where it was."""
        if self.is_counted:
            config = self.loader.config
            share = self.loader.num_rows() / ((config.batch_size or 1) * config.ranks.world_size)
            return math.floor(share) if config.drop_last else math.ceil(share)

        before = self.loader.state_dict()
        num_batches = sum(1 for _ in self.loader)
        self.loader.load_state_dict(before)
        return num_batches


class _RepeatedPrompts:
    """Batches of a trainer that samples several completions of a prompt, in the layout of TRL's ``RepeatSampler``.

    A *generation batch* has ``generation_batch_size / num_generations`` prompts, each ``num_generations`` times in a
    row. Each rank has its part of that list, as often as the trainer uses it: ``num_iterations *
    steps_per_generation`` times. The state counts how often it was used, so that a checkpoint between two
    generation batches, or within one, continues with the same prompts.
    """

    is_over = False  # as in _Batches

    def __init__(self, trainer: Any, loader: DataLoader[Any, Any], item: Callable[[Sample], Any]) -> None:
        args = trainer.args
        self.loader = loader
        self.is_counted = self.can_count = isinstance(loader.config.order, RowShuffle)
        self._trainer = trainer
        self._item = item
        self._num_generations = trainer.num_generations
        self._num_prompts = args.generation_batch_size // trainer.num_generations
        self._num_repeats = getattr(trainer, "num_iterations", 1) * args.steps_per_generation
        size = args.generation_batch_size // args.world_size
        self._part = slice(args.process_index * size, (args.process_index + 1) * size)
        self._before: dict[str, Any] | None = None
        self._num_used = 0
        need(trainer, "_step")

    def __iter__(self) -> Iterator[list[Any]]:
        while not self.is_over:
            before = self.loader.state_dict()
            try:
                samples = self.loader.get_next_batch(self._num_prompts)
            except EndOfData as end:
                if end.groups:  # as TRL's sampler does it
                    _log.warning("prompts.left_out", number=len(end.groups), generation_batch=self._num_prompts)
                return

            rows = [sample for sample in samples for _ in range(self._num_generations)][self._part]
            self._before = before
            while self._num_used < self._num_repeats:
                self._num_used += 1
                yield list(map(self._item, rows))
            self._before, self._num_used = None, 0

    @property
    def progress(self) -> float:
        """Epochs of which the trainer has had prompts."""
        return epochs_of(self.loader._engine)  # noqa: SLF001 - a part of this library

    def num_batches(self) -> int:
        """The batches of an epoch, with all their repeats."""
        num_batches: int = math.ceil(self.loader.num_rows() / self._num_prompts) * self._num_repeats
        return num_batches

    def state_dict(self) -> dict[str, Any]:
        """The state before the present generation batch, and how often that was used."""
        if self._before is None or self._num_used >= self._num_repeats:
            return {**to_torch_state(self.loader.state_dict()), "num_used": 0}

        return {**to_torch_state(self._before), "num_used": self._num_used}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict(from_torch_state({key: state[key] for key in state if key != "num_used"}))
        self._before, self._num_used = None, state["num_used"]
        # TRL samples completions where it is a multiple: not yet, in mid-block.
        self._trainer._step = self._num_used  # noqa: SLF001 - nothing public tells it


# From which checkpoint a training continues, and for how many steps


def _saved_whole(given: Any, folder: str) -> Any:
    """The checkpoint to resume from: ``given``, or the last one before it that was saved whole.

    A trainer that is killed while it saves leaves a checkpoint without its state, which is written last. Frameworks
    pass the newest one all the same, and the trainer could not start from it.

    :param given: what the trainer was given: a path, True for the newest one of ``folder``, or nothing.
    :raises SnapshotError: AD641, if there is none.
    """
    if not given or (given is not True and _is_whole(Path(given))):
        return given

    place = Path(folder) if given is True else Path(given).parent
    numbers = {path: int(found[1]) for path in place.glob("checkpoint-*") if (found := _NUMBERED.fullmatch(path.name))}
    if given is not True:
        limit = numbers.get(Path(given))
        numbers = {} if limit is None else {path: number for path, number in numbers.items() if number <= limit}
    newest = sorted(numbers, key=numbers.__getitem__, reverse=True)
    whole = next(filter(_is_whole, newest), None)
    if not newest:
        return given  # transformers says what is wrong

    if whole is None:
        raise SnapshotError(
            f"AD641 {newest[0]} was not saved whole: it has no readable {_STATE}, which is written last, and there is "
            "no earlier checkpoint. Delete it, and start without resume_from_checkpoint"
        )

    for path in newest[: newest.index(whole)]:
        _log.warning("checkpoint.left_out", path=str(path), reason=f"no readable {_STATE}", resumes_from=str(whole))
    return str(whole)


def _is_whole(path: Path) -> bool:
    try:
        json.loads((path / _STATE).read_bytes())
    except (OSError, ValueError):
        return False

    return True


class _Epochs:
    """How many steps ``num_train_epochs`` are. The trainer needs it before the first, for its learning rate."""

    def __init__(self, batches: Any, given: int | Literal["count"] | None, args: Any) -> None:
        if given not in (None, "count") and (type(given) is not int or given < 1):
            raise ConfigError(f"AD643 batches_per_epoch is a whole number from 1 on, or 'count'; got {given!r}")

        if given is None and not batches.is_counted or given == "count" and not batches.can_count:
            raise ConfigError(
                "AD643 the trainer's arguments have no max_steps, and how many batches an epoch of this loader has is "
                "not known: pass max_steps=; or to attach batches_per_epoch= with their number, or with 'count' to "
                "make and count them before the training. Known are those of samples without packing with "
                'RowShuffle(only_kept=True), and the prompts of a trainer that samples groups with shuffle="full"'
            )

        self._batches = batches
        self._given = given
        self._args = args
        self.num_batches = 0  # of an epoch; known when the training begins

    def num_steps(self, checkpoint: Any) -> int:
        """The steps of the whole training."""
        state = json.loads((Path(checkpoint) / _STATE).read_bytes()) if isinstance(checkpoint, str | Path) else {}
        saved = state.get("stateful_callbacks", {}).get(CALLBACK, {})
        saved = saved[-1] if isinstance(saved, list) else saved
        if isinstance(self._given, int):
            self.num_batches = self._given
        else:
            self.num_batches = saved.get("attributes", {}).get("num_batches") or self._batches.num_batches()
        if not self.num_batches:
            raise ConfigError("AD643 an epoch of this loader has no batch: give it more rows, or drop_last=False")

        num_batches = self._args.num_train_epochs * self.num_batches
        num_steps: int = math.ceil(num_batches / self._args.gradient_accumulation_steps)
        return num_steps

    def follow(self, state: Any, control: Any) -> None:
        """After a step: the epoch in the trainer's log, and what the arguments ask for at an epoch's end."""
        done = state.global_step * self._args.gradient_accumulation_steps
        state.epoch = done / self.num_batches
        before = done - self._args.gradient_accumulation_steps
        if done // self.num_batches == before // self.num_batches or state.global_step >= state.max_steps:
            return  # at the end of the training transformers does it

        control.should_log |= self._args.logging_strategy == "epoch"
        control.should_evaluate |= self._args.eval_strategy == "epoch"
        control.should_save |= self._args.save_strategy == "epoch"
