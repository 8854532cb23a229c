"""asyncdata under verl's PPO trainers: the class for ``data.custom_cls``. That for SFT is in ``verl_sft``.

::

    data:
      custom_cls: {path: pkg://asyncdata.integrations.verl, name: RLDataset}
      shuffle: false
      dataloader_num_workers: 0
      asyncdata: {num_workers: 2, shuffle: full, seed: 1}

verl's ``StatefulDataLoader`` keeps the state in its own ``data.pt``. Each row is what verl's ``RLHFDataset`` makes of
it, and has the sample's position as ``extra_info["asyncdata_id"]``, the same before and after a restart.
"""

from __future__ import annotations

import os
from base64 import b64decode
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError
from asyncdata.core.extras import made_on_first_use
from asyncdata.integrations.torch.row_scores import key_of, report_keys
from asyncdata.integrations.torch.rows import order_view_of_rows, row_view_of_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from asyncdata.core.types import Sample
    from asyncdata.integrations.torch.views import LoaderOrderView, LoaderRowView

__all__ = (
    "RLDataset",  # noqa: F822 - it is made below, as it imports verl
    "VerlRows",
    "are_validation",
    "check",
    "names_of",
    "settings_of",
    "validation_view",
    "with_media",
)

_ID = "asyncdata_id"
_ROW = "asyncdata_row"


class VerlRows:
    """Rows of training data in the loader's order, and rows of validation data as they lie in their files.

    In ``data.asyncdata`` are ``rows_per_epoch`` and the knobs of a :class:`~asyncdata.DataLoader`. By default
    ``shuffle`` is ``"full"``, and ``seed`` is ``data.seed``. With a ``max_samples`` of verl these are the first rows.

    :raises ConfigError: for settings of verl that cannot work; it names them.
    """

    config: Any
    data_files: Sequence[str]
    original_data_files: Sequence[str]  # as the configuration names them: verl may have copied them
    max_samples: int
    image_key: str
    video_key: str
    audio_key: str

    def __init__(self, *arguments: Any, **named: Any) -> None:
        if "parquet_files" in named:
            raise ConfigError(
                "AD447 data.custom_cls names RLDataset, and this is verl's SFT trainer: set data.custom_cls.path to "
                "pkg://asyncdata.integrations.verl_sft, and data.custom_cls.name to SFTDataset"
            )

        super().__init__(*arguments, **named)

    def _read_files_and_tokenize(self) -> None:
        """Called by the constructor of verl's class, which would read all rows here; its recipes replace this too."""
        files = [os.path.expanduser(path) for path in self.data_files]
        stop = self.max_samples if self.max_samples > 0 else None
        check(self.config)
        self._view = self._validation(files, stop) if self.is_validation() else self._training(files, stop)
        self.dataframe = _PassedOn(self._view)

    def is_validation(self) -> bool:
        """Whether these are the files of ``data.val_files``: verl makes both data sets with the same arguments."""
        return are_validation(self.original_data_files, self.config)

    def _training(self, files: list[str], stop: int | None) -> LoaderOrderView:
        return order_view_of_rows(files, settings_of(self.config), item=self._row, stop=stop)

    def _validation(self, files: list[str], stop: int | None) -> LoaderRowView:
        return validation_view(files, self.config, item=self._row, stop=stop)

    def _row(self, sample: Sample) -> dict[str, Any]:
        row = with_media(sample.extra, (self.image_key, self.video_key, self.audio_key))
        row["extra_info"] = {**(row.get("extra_info") or {}), _ID: str(sample.position)}
        key = key_of(self._view.loader, sample)
        if key is not None and not self.is_validation():
            row["extra_info"][_ROW] = key
        return row

    def on_batch_end(self, batch: Any) -> None:
        """Remember the scores of a batch, with ``data.asyncdata.outcomes``. verl's trainer calls this after each step.

        :param batch: a ``DataProto`` with ``extra_info``, and ``token_level_scores`` of shape (rollouts, tokens).
        """
        rows = [(info or {}).get(_ROW) for info in batch.non_tensor_batch.get("extra_info", ())]
        if None not in rows and rows:
            report_keys(self._view.loader, rows, batch.batch["token_level_scores"].sum(-1).tolist())

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of a batch, with the fields that verl's own class adds."""
        make: Any = super().__getitem__  # type: ignore[misc]
        return [make(row) for row in self._view.__getitems__(indices)]

    def state_dict(self) -> dict[str, Any]:
        """The state after the last row; torchdata puts it into verl's ``data.pt``."""
        return self._view.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the row that would have come next.

        :raises SnapshotError: if it is of other data or settings.
        """
        self._view.load_state_dict(state)

    def close(self) -> None:
        """Close the loader."""
        self._view.close()


class _PassedOn:
    """What verl's ``__getitem__`` takes its row from: the row itself stands for an index."""

    def __init__(self, view: LoaderOrderView | LoaderRowView) -> None:
        self._view = view

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, row: dict[str, Any]) -> dict[str, Any]:
        return row


_REFUSED = {
    "shuffle": (
        "makes verl's sampler ask for rows out of order. Set data.shuffle=false, and data.asyncdata.shuffle to the "
        "order that you want; it is 'full' by default"
    ),
    "dataloader_num_workers": (
        "makes torch copy the data set into other processes, each of which would deliver the same rows. Set "
        "data.dataloader_num_workers=0, and data.asyncdata.num_workers to the number of workers"
    ),
    "validation_shuffle": (
        "restarts the reading for each row of the validation data. Set data.validation_shuffle=false"
    ),
    "filter_overlong_prompts": (
        "needs all prompts as tokens before the first step. Filter the files once, and set "
        "data.filter_overlong_prompts=false"
    ),
}
"""Settings of verl, in ``data``, that must be off -> what they would do, and the way out."""

_ON_BY_DEFAULT = {"validation_shuffle", "filter_overlong_prompts"}  # where verl's configuration lacks them


def check(config: Any) -> None:
    """Refuse settings of verl that would break the order.

    :raises ConfigError: naming the first one.
    """
    for name, why in _REFUSED.items():
        value = config.get(name, name in _ON_BY_DEFAULT)
        if value:
            raise ConfigError(f"AD447 data.{name}={value} {why}")


def names_of(files: Any) -> list[str]:
    """The names of ``data.train_files``: one, or a list."""
    return [files] if isinstance(files, str) else [str(name) for name in files or ()]


def are_validation(files: Any, config: Any) -> bool:
    """Whether ``files`` are those of ``data.val_files``.

    :raises ConfigError: if these are those of ``data.train_files`` too.
    """
    train, validation = (names_of(config.get(key)) for key in ("train_files", "val_files"))
    if train and train == validation:
        raise ConfigError(
            f"AD447 data.train_files and data.val_files of verl are the same, {train}, so that training and "
            "validation data cannot be told apart: give one of them another name, such as that of a link"
        )

    return names_of(files) == validation


def settings_of(config: Any) -> dict[str, Any]:
    """What ``data.asyncdata`` has, with the ``seed`` of ``data`` where it has none."""
    seed = config.get("seed")
    settings = dict(config.get("asyncdata") or {})
    return settings if seed is None else {"seed": seed, **settings}


def validation_view(
    files: Sequence[str], config: Any, *, item: Callable[[Sample], Any], stop: int | None
) -> LoaderRowView:
    """Rows as they lie in their files. One thread reads them: they are few, and are read between two steps."""
    settings = {name: value for name, value in settings_of(config).items() if name in ("cache", "timeout_s")}
    return row_view_of_rows(files, {"shuffle": False, "num_workers": 0, **settings}, item=item, stop=stop)


def with_media(row: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The row, with the bytes of the images, videos and sounds in the columns ``keys``."""
    return {**row, **{key: [_decoded(item) for item in row[key]] for key in keys if row.get(key)}}


def _decoded(item: Any) -> Any:
    """An image, a video or a sound with its bytes: rows are JSON on their way, which has them as base64."""
    if isinstance(item, dict) and isinstance(item.get("bytes"), str):
        return {**item, "bytes": b64decode(item["bytes"])}

    return item


def _dataset() -> type:
    from verl.utils.dataset.rl_dataset import RLHFDataset

    return type("RLDataset", (VerlRows, RLHFDataset), {"__doc__": VerlRows.__doc__})


__getattr__ = made_on_first_use(__name__, "verl", {"RLDataset": _dataset})
