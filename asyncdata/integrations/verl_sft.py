"""asyncdata under verl's SFT trainer: the class for ``data.custom_cls``.

::

    data:
      custom_cls: {path: pkg://asyncdata.integrations.verl_sft, name: SFTDataset}
      num_workers: 0
      asyncdata: {num_workers: 2, shuffle: full, seed: 1, rows_per_epoch: 300000}
    trainer:
      total_epochs: 1

verl shuffles with a ``DistributedSampler`` that no setting turns off. Its permutation is known, so it is undone here:
the k-th index that all ranks together ask for gives the k-th row of the loader's order.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError, SnapshotError
from asyncdata.integrations.adapters import OfView, made_on_first_use, need, refuse
from asyncdata.integrations.torch.datasets import LoaderRowView, SamplerPlaces, view_of_rows
from asyncdata.integrations.torch.process import refuse_in_torch_worker
from asyncdata.integrations.verl import (
    RowsByThemselves,
    are_validation,
    names_of,
    settings_of,
    validation_view,
    with_media,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncdata.core.types import Sample

__all__ = ("SFTDataset", "VerlSFTRows", "check")  # noqa: F822 - SFTDataset is made below

_PLACES = "sampler_places"
_MAX_GAP = 1024  # as many ranks read on from row to row; for more, each row would be looked up


class VerlSFTRows(OfView):
    """Rows of training data in the loader's order, and rows of validation data as they lie in their files.

    In ``data.asyncdata`` are the settings of a :class:`~asyncdata.DataLoader`, and ``rows_per_epoch``: the rows of the
    whole training, which must be one epoch of verl. By default ``shuffle`` is ``"full"``, and ``seed`` is
    ``data.seed``. With a ``max_samples`` of verl these are the first rows.

    :raises ConfigError: for settings of verl that cannot work; it names them.
    """

    parquet_files: Sequence[str]
    max_samples: int
    tokenizer: Any
    apply_chat_template_kwargs: Mapping[str, Any]
    image_key: str
    video_key: str
    tools_key: str
    enable_thinking_key: str
    enable_thinking_default: Any

    def __init__(
        self,
        parquet_files: Any = None,
        tokenizer: Any = None,
        config: Any = None,
        processor: Any = None,
        max_samples: int = -1,
        **others: Any,
    ) -> None:
        if parquet_files is None:
            raise ConfigError(
                f"AD447 data.custom_cls names SFTDataset, which verl's SFT trainer makes with parquet_files=, not with "
                f"{', '.join(sorted(others)) or 'nothing'}: for the PPO trainers set data.custom_cls.path to "
                "pkg://asyncdata.integrations.verl, and data.custom_cls.name to RLDataset"
            )

        check(config)
        self._config = config
        self._is_validation = are_validation(parquet_files, config)
        self._places: SamplerPlaces | None = None
        base: Any = super()
        base.__init__(names_of(parquet_files), tokenizer, config, processor, max_samples, **others)

    def _read_files_and_process(self) -> None:
        """Called by the constructor of verl's class, which would read all rows here."""
        files = [os.path.expanduser(path) for path in self.parquet_files]
        stop = self.max_samples if self.max_samples > 0 else None
        if self._is_validation:
            self._view = validation_view(files, self._config, item=self._row, stop=stop)
        else:
            settings = settings_of(self._config)
            self._view = view_of_rows(LoaderRowView, files, settings, item=self._row, stop=stop, max_gap=_MAX_GAP)
        thinking = self.enable_thinking_key, self.enable_thinking_default
        self.dataframe = RowsByThemselves(self._view, _Row)
        self.tools = RowsByThemselves(self._view, lambda row: row.get(self.tools_key))
        self.enable_thinking = RowsByThemselves(self._view, lambda row: row.get(*thinking))
        templates = importlib.import_module("verl.utils.tokenizer.chat_template")
        extract = need(templates, "extract_system_prompt_and_generation")
        self.system_prompt, self.generation_prompt = extract(self.tokenizer, **self.apply_chat_template_kwargs)

    def _row(self, sample: Sample) -> dict[str, Any]:
        return with_media(sample.extra, (self.image_key, self.video_key))

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """What verl's own class makes of the rows of a batch.

        :raises ConfigError: in a worker process of torch, and for indices that are not the sampler's next ones.
        """
        _refuse_workers()
        make: Any = super().__getitem__  # type: ignore[misc]
        if self._is_validation or not len(indices):
            return [make(row) for row in self._view.__getitems__(indices)]

        sequence = self._sequence()
        places = sequence.of(indices)
        if places is None:
            raise ConfigError(
                f"AD447 the sampler asks for {list(indices)[:8]}, which are not the next indices of one epoch of "
                "verl's SFT trainer. Set trainer.total_epochs=1, and data.asyncdata.rows_per_epoch to the rows of the "
                "whole training; continue a run with its number of data-parallel ranks, and from a checkpoint that "
                "SFTDataset was used for; change no sampler of verl"
            )

        made = [make(row) for row in self._view.__getitems__(places)]
        sequence.took(places)
        return made

    def _sequence(self) -> SamplerPlaces:
        if self._places is None:
            self._places = SamplerPlaces(len(self))
        return self._places

    def state_dict(self) -> dict[str, Any]:
        """The state after the last row; torchdata puts it into verl's ``data_N.pt``. It tells other data, settings or
        ranks; the rows themselves need none.
        """
        return {**self._view.state_dict(), _PLACES: self._sequence().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Demand the row that would have come next.

        :raises SnapshotError: if it is not a state of this class, or is of other data or settings.
        """
        places = state.get(_PLACES)
        if not isinstance(places, dict):
            raise SnapshotError(f"AD602 this is not a state of SFTDataset: it has no {_PLACES!r}")

        self._view.load_state_dict({key: state[key] for key in state if key != _PLACES})
        self._sequence().load_state_dict(places)


class _Row(dict[str, Any]):
    """A row, as a line of the table that verl takes it from."""

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


_REFUSED = {
    "num_workers": (
        "makes torch copy the data set into other processes, each of which would read all rows. Set "
        "data.num_workers=0, and data.asyncdata.num_workers to the number of workers"
    )
}


def check(config: Any) -> None:
    """Refuse settings of verl that would break the order.

    :raises ConfigError: naming the first one.
    """
    refuse(config, _REFUSED, "AD447 data.{name}={value} {reason}")
    if settings_of(config).get("shuffle") is True:
        raise ConfigError(
            "AD447 data.asyncdata.shuffle=true counts no rows, and verl's SFT trainer needs their number. Set "
            "data.asyncdata.shuffle to 'full', or to false for the order of the files"
        )

    epochs = _total_epochs(config)
    if epochs not in (None, 1):
        raise ConfigError(
            f"AD447 trainer.total_epochs={epochs}: verl shuffles each epoch in its own way, and a restart at an "
            "epoch's end loses the next one. Set trainer.total_epochs=1, and data.asyncdata.rows_per_epoch to the rows "
            "of the whole training; each pass over the data has an order of its own"
        )


def _total_epochs(config: Any) -> Any:
    """``trainer.total_epochs`` of the configuration that ``data`` is in; None if that cannot be seen."""
    omegaconf: Any = sys.modules.get("omegaconf")
    if omegaconf is None or not omegaconf.OmegaConf.is_config(config):
        return None

    return omegaconf.OmegaConf.select(config, "..trainer.total_epochs")


def _refuse_workers() -> None:
    try:
        refuse_in_torch_worker()
    except ConfigError as error:
        raise ConfigError(
            "AD447 the data set is read in a worker process of torch, and each would read all rows. Set "
            "data.num_workers=0, and train with verl.trainer.sft_trainer: sft_trainer_ray always starts workers "
            "of torch"
        ) from error


__getattr__ = made_on_first_use(
    __name__,
    "verl",
    {
        "SFTDataset": (
            VerlSFTRows,
            "verl.utils.dataset.multiturn_sft_dataset:MultiTurnSFTDataset",
            "_read_files_and_process",
        )
    },
)
