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

import functools
import os
import sys
from base64 import b64decode
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError
from asyncdata.core.threads import identity
from asyncdata.integrations.adapters import KEY, OfView, key_of, made_on_first_use, need, refuse, report_keys
from asyncdata.integrations.torch.datasets import LoaderOrderView, LoaderRowView, view_of_rows
from asyncdata.tokenization.functions.prompt import PromptRowFn

if TYPE_CHECKING:
    from asyncdata.core.types import Sample
    from asyncdata.tokenization.base import TokenizeFn

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


class VerlRows(OfView):
    """Rows of training data in the loader's order, and rows of validation data as they lie in their files.

    In ``data.asyncdata`` are ``rows_per_epoch`` and the settings of a :class:`~asyncdata.DataLoader`. By default
    ``shuffle`` is ``"full"``, and ``seed`` is ``data.seed``. With a ``max_samples`` of verl these are the first rows.

    :raises ConfigError: for settings of verl that cannot work; it names them.
    """

    config: Any
    data_files: Sequence[str]
    original_data_files: Sequence[str]  # as the configuration names them: verl may have copied them
    max_samples: int
    image_key: str
    video_key: str
    audio_key: str  # of newer versions
    prompt_key: str
    max_prompt_length: int
    filter_overlong_prompts: bool
    tokenizer: Any
    processor: Any

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
        self.dataframe = RowsByThemselves(self._view)

    def is_validation(self) -> bool:
        """Whether these are the files of ``data.val_files``: verl makes both data sets with the same arguments."""
        return are_validation(self.original_data_files, self.config)

    def _training(self, files: list[str], stop: int | None) -> LoaderOrderView:
        settings = settings_of(self.config)
        fn = self._prompt_fn(settings.pop("today", None))
        if settings.get("outcomes") is not None:
            report_in_v1_trainer()
        kept = self.filter_overlong_prompts
        return view_of_rows(LoaderOrderView, files, settings, item=self._row, stop=stop, tokenize_fn=fn, only_kept=kept)

    def _validation(self, files: list[str], stop: int | None) -> LoaderRowView:
        fn = self._prompt_fn(settings_of(self.config).get("today"))
        return validation_view(files, self.config, item=self._row, stop=stop, tokenize_fn=fn)

    def _prompt_fn(self, today: str | None) -> PromptRowFn | None:
        """What drops the prompts that verl would filter out; None if it filters none."""
        if not self.filter_overlong_prompts:
            return None

        if self.processor is not None:
            raise ConfigError(
                "AD447 data.filter_overlong_prompts=True with a model that takes images, videos or audio: asyncdata "
                "does not count their tokens. Filter the files once, and set data.filter_overlong_prompts=false"
            )

        given = self.config.get("apply_chat_template_kwargs") or {}
        variables = {name: _plain(value) for name, value in given.items() if name not in _OF_TOKENIZING}
        template = variables.pop("chat_template", None) or self.tokenizer.chat_template
        return PromptRowFn(
            self.tokenizer.name_or_path,
            prompt_key=self.prompt_key,
            tool_key=None,
            metadata_key=None,
            apply_chat_template=True,
            chat_template=template if isinstance(template, str) else None,
            chat_template_kwargs=variables,
            today=today,
            max_length=self.max_prompt_length,
            tools=getattr(self, "tool_schemas", None),
        )

    def _row(self, sample: Sample) -> dict[str, Any]:
        row = with_media(sample.extra, (self.image_key, self.video_key, getattr(self, "audio_key", "audios")))
        row["extra_info"] = {**(row.get("extra_info") or {}), _ID: str(sample.position)}
        key = key_of(self._view.loader, sample)
        if key is not None and not self.is_validation():
            row["extra_info"][KEY] = key
        return row

    def on_batch_end(self, batch: Any) -> None:
        """Remember the scores of a batch, with ``data.asyncdata.outcomes``. verl's older trainer calls this.

        :param batch: a ``DataProto`` with ``extra_info``, and ``token_level_scores`` of shape (rollouts, tokens).
        """
        rows = [(info or {}).get(KEY) for info in batch.non_tensor_batch.get("extra_info", ())]
        if None not in rows and rows:
            report_keys(self._view.loader, rows, batch.batch["token_level_scores"].sum(-1).tolist())

    def on_sampled(self, keys: Iterable[str], partition: str, queue: Any) -> None:
        """The same for the trainer of ``trainer.use_v1``, whose batches are keys of its TransferQueue.

        :param keys: of rollouts. Of the outputs of one, ``uid_rollout_number``, the last one counts.
        :param queue: the module ``transfer_queue``.
        """
        last: dict[str, str] = {}
        for key in keys:
            rollout = key.rpartition("_")[0]
            last[rollout] = max(key, last.get(rollout, key), key=lambda name: int(name.rpartition("_")[2]))
        if not last:
            return

        fields = ["extra_info", "rm_scores"]
        found = queue.kv_batch_get(keys=list(last.values()), partition_id=partition, select_fields=fields)
        rows = [(getattr(info, "data", info) or {}).get(KEY) for info in list(found["extra_info"])]
        if None not in rows:
            report_keys(self._view.loader, rows, found["rm_scores"].sum(dim=1).tolist())

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The rows of a batch, with the fields that verl's own class adds."""
        make: Any = super().__getitem__  # type: ignore[misc]
        return [make(row) for row in self._view.__getitems__(indices)]


def report_in_v1_trainer() -> None:
    """Have the trainer of ``trainer.use_v1``, if it is the one that runs, report scores as soon as it has them.

    It has no hook for that: its advantages are computed from the scores, before it saves a checkpoint. Groups that
    ``algorithm.filter_groups`` leaves out have no advantages, and are reported when its replay buffer clears them.

    :raises ConfigError: for a version of verl that computes them elsewhere.
    """
    module = sys.modules.get("verl.trainer.ppo.v1.trainer_base")
    if module is None:
        return

    def sampled(trainer: Any, batch: Any, *_: Any, **__: Any) -> None:
        if isinstance(trainer.train_dataset, VerlRows):
            pairs = zip(batch.keys, batch.tags, strict=True)
            keys = [key for key, tag in pairs if not tag.get("is_padding", False)]
            trainer.train_dataset.on_sampled(keys, batch.partition_id, module.tq)

    def left_out(buffer: Any, partition_id: str, uids: Collection[str]) -> None:
        """Only with a filter: then verl makes sure that rollouts have their scores by now."""
        if partition_id == "val" or need(buffer, "filter_groups_metric") is None:
            return

        rows = need(need(need(buffer, "refill_fn"), "__self__"), "train_dataset")
        if isinstance(rows, VerlRows):
            keys = [key for key in need(buffer, "partitions")[partition_id] if key.partition("_")[0] in uids]
            rows.on_sampled(keys, partition_id, module.tq)

    _call_before(need(module, "PPOTrainer"), "_compute_advantage", sampled)
    _call_before(need(module, "ReplayBuffer"), "_clear_groups", left_out)


def _call_before(kind: type, name: str, report: Callable[..., None]) -> None:
    """Have a method of verl, which has no hook there, call ``report`` with the same arguments first."""
    method = need(kind, name)
    if getattr(method, "reports_to_asyncdata", False):
        return

    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        report(self, *arguments, **named)
        return method(self, *arguments, **named)

    call.reports_to_asyncdata = True  # type: ignore[attr-defined]
    setattr(kind, name, call)


class RowsByThemselves:
    """A table of verl's class, in which a row stands for its index.

    :param found: what verl finds there for a row.
    """

    def __init__(
        self, view: LoaderOrderView | LoaderRowView, found: Callable[[dict[str, Any]], Any] = identity
    ) -> None:
        self._view = view
        self._found = found

    @property
    def iloc(self) -> RowsByThemselves:
        return self

    def __len__(self) -> int:
        return len(self._view)

    def __getitem__(self, row: dict[str, Any]) -> Any:
        return self._found(row)


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
}
"""Settings of verl, in ``data``, that must be off -> what they would do, and the way out."""

_OF_TOKENIZING = {"tokenize", "return_dict", "return_tensors"}
"""Of ``data.apply_chat_template_kwargs``: verl leaves these out too when it counts tokens."""


def check(config: Any) -> None:
    """Refuse settings of verl that would break the order.

    :raises ConfigError: naming the first one.
    """
    given = {name: config.get(name, name == "validation_shuffle") for name in _REFUSED}  # which is on by default
    refuse(given, _REFUSED, "AD447 data.{name}={value} {reason}")


def names_of(files: Any) -> list[str]:
    """The names of ``data.train_files``: one, or a list."""
    return [files] if isinstance(files, str) else [str(name) for name in files or ()]


def are_validation(files: Any, config: Any) -> bool:
    """Whether ``files`` are ``data.val_files``.

    :raises ConfigError: if they are ``data.train_files`` too.
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
    files: Sequence[str],
    config: Any,
    *,
    item: Callable[[Sample], Any],
    stop: int | None,
    tokenize_fn: TokenizeFn | None = None,
) -> LoaderRowView:
    """Rows as they lie in their files. One thread reads them: they are few, and are read between two steps."""
    settings = {name: value for name, value in settings_of(config).items() if name in ("cache", "timeout_s")}
    settings = {"shuffle": False, "num_workers": 0, **settings}
    fn, kept = tokenize_fn, tokenize_fn is not None
    return view_of_rows(LoaderRowView, files, settings, item=item, stop=stop, tokenize_fn=fn, only_kept=kept)


def _plain(value: Any) -> Any:
    """A value of verl's configuration, which may be OmegaConf's."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}

    return [_plain(item) for item in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


def with_media(row: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The row, with the bytes of the images, videos and sounds in the columns ``keys``."""
    return {**row, **{key: [_decoded(item) for item in row[key]] for key in keys if row.get(key)}}


def _decoded(item: Any) -> Any:
    """An image, a video or a sound with its bytes: rows are JSON on their way, which has them as base64."""
    if isinstance(item, dict) and isinstance(item.get("bytes"), str):
        return {**item, "bytes": b64decode(item["bytes"])}

    return item


__getattr__ = made_on_first_use(
    __name__, "verl", {"RLDataset": (VerlRows, "verl.utils.dataset.rl_dataset:RLHFDataset", "_read_files_and_tokenize")}
)
