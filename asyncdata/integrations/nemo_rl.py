"""asyncdata under NeMo-RL's GRPO: a data set for ``data.train.dataset_name``, and its state in NeMo-RL's checkpoints.

::

    data:
      shuffle: false
      num_workers: 0
      train:
        dataset_name: asyncdata.integrations.nemo_rl.RowDataset
        data_path: prompts.jsonl
        asyncdata: {num_workers: 2}

In a copy of NeMo-RL's ``examples/run_grpo.py``, one line after ``setup_response_data``::

    dataset = with_state(dataset)

NeMo-RL's own processors make of a row what its trainers take. The state is in ``train_dataloader.pt``.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError
from asyncdata.integrations.adapters import OfView, made_on_first_use
from asyncdata.integrations.torch.views import LoaderOrderView, view_of_rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncdata.core.types import Sample

__all__ = ("NemoRows", "RowDataset", "with_state")  # noqa: F822 - RowDataset is made below, as it imports NeMo-RL


class NemoRows:
    """Rows in the loader's order, with ``messages`` and ``task_name`` as NeMo-RL's ``ResponseDataset`` gives them.

    :param data_path: a file, a glob, a folder, or a list of these.
    :param input_key: the key of the prompt, in rows without ``messages``.
    :param output_key: the key of the answer, in the same rows.
    :param asyncdata: ``rows_per_epoch``, and settings of a :class:`~asyncdata.DataLoader`; ``shuffle`` is ``"full"`` by
        default.
    :param task_name: names the data; None: the last folder and the file of ``data_path``.
    :raises ConfigError: for settings that cannot work.
    :raises SourceError: for files that cannot be read.
    """

    val_dataset = None

    def __init__(
        self,
        data_path: Any,
        input_key: str = "input",
        output_key: str = "output",
        asyncdata: Mapping[str, Any] | None = None,
        task_name: str | None = None,
        **_: Any,
    ) -> None:
        paths = [data_path] if isinstance(data_path, str) else list(data_path)
        self.input_key = input_key
        self.output_key = output_key
        self.task_name = task_name or f"{Path(paths[0]).resolve().parent.name}-{Path(paths[0]).name.partition('.')[0]}"
        self.dataset = view_of_rows(LoaderOrderView, paths, asyncdata or {}, item=self._row)

    def _row(self, sample: Sample) -> dict[str, Any]:
        row = dict(sample.extra)
        if "messages" in row:
            return {**row, "task_name": self.task_name}

        messages = [("user", row[self.input_key]), ("assistant", row[self.output_key])]
        return {
            "messages": [{"role": role, "content": content} for role, content in messages],
            "task_name": self.task_name,
        }


class _WithState(OfView):
    """NeMo-RL's data set, with the state that its ``StatefulDataLoader`` looks for."""

    def __init__(self, processed: Any) -> None:
        self._processed = processed
        self._view = processed.dataset

    def __getitem__(self, index: int) -> Any:
        return self._processed[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self._processed[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processed, name)


def with_state(dataset: Any) -> Any:
    """The data set of NeMo-RL's ``setup_response_data`` with its state, which ``grpo.setup`` saves and restores.

    :param dataset: of one entry of ``data.train``, a ``RowDataset``; or a dict of them, one for each task.
    :raises ConfigError: for another data set: its place could not be restored.
    """
    if isinstance(dataset, dict):
        return {name: with_state(of_task) for name, of_task in dataset.items()}

    if not isinstance(getattr(dataset, "dataset", None), LoaderOrderView):
        raise ConfigError(
            f"with_state() was given {type(getattr(dataset, 'dataset', dataset)).__name__}, which has no loader's "
            "state: data.train needs one entry, with dataset_name=asyncdata.integrations.nemo_rl.RowDataset; its "
            "data_path may be a list of files"
        )

    return _WithState(dataset)


__getattr__ = made_on_first_use(
    __name__, "nemo-rl", {"RowDataset": (NemoRows, "nemo_rl.data.datasets.raw_dataset:RawDataset")}
)
