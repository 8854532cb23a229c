"""asyncdata under OpenRLHF's PPO, REINFORCE++ and GRPO, also asynchronous ones.

::

    import runpy

    from asyncdata.integrations.openrlhf import plug_in

    plug_in(num_workers=2, seed=1)
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")

OpenRLHF has no hook for its prompts. ``plug_in`` replaces the function that makes its loader of them, also within Ray's
actors. The state is in ``data_loader_state_dict`` of OpenRLHF's checkpoints.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError
from asyncdata.core.extras import missing_package
from asyncdata.integrations.torch.rows import order_view_of_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from asyncdata.core.types import Sample
    from asyncdata.integrations.torch.views import LoaderOrderView

__all__ = ("PromptLoader", "plug_in", "prepare_datasets")


def plug_in(source: Any = None, *, rows_per_epoch: int | None = None, **knobs: Any) -> None:
    """Let OpenRLHF read its prompts with asyncdata. Call it before OpenRLHF starts its trainer.

    :param source: what a :class:`~asyncdata.DataLoader` reads; None: the files of ``--data.prompt_dataset``.
    :param rows_per_epoch: prompts of an episode; None: all rows.
    :param knobs: of the :class:`~asyncdata.DataLoader`; ``shuffle`` is ``"full"`` by default.
    :raises ConfigError: if OpenRLHF cannot be imported.
    """
    try:
        import openrlhf.trainer.ppo_trainer as trainer
        import openrlhf.trainer.ppo_trainer_async as async_trainer
    except ImportError as error:
        raise missing_package("plug_in", "openrlhf", error) from error

    # Ray sends each trainer class by its text, and the functions that it calls by their names: this one then too.
    settings = {"rows_per_epoch": rows_per_epoch, **knobs}
    ours = functools.partial(prepare_datasets, source=source, settings=settings)
    trainer.prepare_datasets = async_trainer.prepare_datasets = ours


def prepare_datasets(
    strategy: Any, tokenizer: Any, *, source: Any, settings: Mapping[str, Any]
) -> tuple[PromptLoader, Any, int]:
    """What OpenRLHF's function of this name gives: the loader of prompts, that of the evaluation, and the steps.

    :raises ConfigError: AD460, for a setting of OpenRLHF with which prompts would be lost or the order changed.
    """
    args = strategy.args
    _check(args, source)
    files = [name.strip() for name in args.data.prompt_dataset.split(",")] if source is None else source
    view = order_view_of_rows(files, settings, item=functools.partial(_prompt, _reader(args, tokenizer)))
    steps = len(view) * args.rollout.n_samples_per_prompt // args.train.batch_size
    return PromptLoader(view), _evaluation(strategy, tokenizer), steps * args.train.num_episodes * args.train.max_epochs


def _check(args: Any, source: Any) -> None:
    size = args.rollout.batch_size
    generated = getattr(args.rollout, "vllm_generate_batch_size", None) or size
    if generated > size:
        raise ConfigError(
            f"AD460 --rollout.vllm_generate_batch_size is {generated} and --rollout.batch_size {size}: OpenRLHF keeps "
            "the rest of the prompts in a buffer that is in no checkpoint, and a restart would lose them. Leave the "
            "former out"
        )

    if source is None and args.data.prompt_probs is not None:
        raise ConfigError(
            "AD460 --data.prompt_probs is not followed: leave it out, and pass a mixture of sources to plug_in()"
        )


def _reader(args: Any, tokenizer: Any) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Makes of a row what OpenRLHF's ``PromptDataset`` makes of it."""
    from openrlhf.datasets.prompts_dataset import preprocess_data

    data = args.data
    template = tokenizer.apply_chat_template if getattr(data, "apply_chat_template", False) else None

    def read(row: Mapping[str, Any]) -> tuple[Any, ...]:
        prompt, label = preprocess_data(
            row, data.input_template, data.input_key, getattr(data, "label_key", None), template
        )
        return row.get("datasource", "default"), prompt, label, row.get(getattr(data, "image_key", "images"))

    return read


def _prompt(read: Callable[[Mapping[str, Any]], tuple[Any, ...]], sample: Sample) -> tuple[Any, ...]:
    return read(sample.extra)


def _evaluation(strategy: Any, tokenizer: Any) -> Any:
    """OpenRLHF's own loader of the evaluation."""
    from openrlhf.datasets import PromptDataset
    from openrlhf.datasets.utils import blending_datasets

    args = strategy.args
    if not getattr(args.eval, "dataset", None):
        return None

    rows = blending_datasets(args.eval.dataset, None, strategy, dataset_split=args.eval.split)
    rows = rows.select(range(min(args.data.max_samples, len(rows))))
    prompts = PromptDataset(rows, tokenizer, strategy, input_template=args.data.input_template)
    workers = args.data.dataloader_num_workers
    return strategy.setup_dataloader(prompts, 1, True, False, prompts.collate_fn, num_workers=workers)


class PromptLoader:
    """Batches of one prompt; the end of an episode ends an iteration.

    OpenRLHF saves the number of the episode beside the state, and begins with that episode again. So a state at the end
    of an episode gives an iteration without a batch, also if OpenRLHF had seen that end.
    """

    def __init__(self, view: LoaderOrderView) -> None:
        self._view = view
        self._next = 0
        self._is_resumed = False

    def __len__(self) -> int:
        return len(self._view)

    def __iter__(self) -> Iterator[tuple[list[Any], ...]]:
        if self._next >= len(self) and not self._is_resumed:
            self._next = 0
        self._is_resumed = False
        while self._next < len(self):
            item = self._view[self._next]
            self._next += 1
            yield tuple([field] for field in item)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last prompt."""
        return {**self._view.state_dict(), "next_prompt": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the prompt that would have come next.

        :raises SnapshotError: if it is not the state of such a loader, or is of other data or settings.
        """
        self._view.load_state_dict({key: state[key] for key in state if key != "next_prompt"})
        self._next = state["next_prompt"]
        self._is_resumed = True
