"""From which checkpoint a trainer of transformers continues, and for how many steps it trains."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.core.log import get_logger

if TYPE_CHECKING:
    from typing import Literal

__all__ = ("CALLBACK", "Epochs", "saved_whole")

_log = get_logger(__name__)

CALLBACK = "AsyncDataState"
"""The key of a loader's state in ``trainer_state.json``."""

_STATE = "trainer_state.json"  # the file of a checkpoint that transformers writes last
_NUMBERED = re.compile(r"checkpoint-(\d+)")


def saved_whole(given: Any, folder: str) -> Any:
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


class Epochs:
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
