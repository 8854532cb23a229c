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
from asyncdata.integrations.adapters import BatchesOfView
from asyncdata.integrations.torch.views import LoaderOrderView, view_of_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncdata.core.types import Sample

__all__ = ("plug_in", "prepare_datasets")


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
) -> tuple[BatchesOfView, Any, int]:
    """What OpenRLHF's function of this name gives: the loader of prompts, that of the evaluation, and the steps.

    :raises ConfigError: AD460, for a setting of OpenRLHF with which prompts would be lost or the order changed.
    """
    args = strategy.args
    _check(args, source)
    files = [name.strip() for name in args.data.prompt_dataset.split(",")] if source is None else source
    item = functools.partial(_prompt, _reader(args, tokenizer))
    view = view_of_rows(LoaderOrderView, files, settings, item=item)
    steps = len(view) * args.rollout.n_samples_per_prompt // args.train.batch_size
    # OpenRLHF saves the number of the episode beside the state, and begins with that episode again.
    loader = BatchesOfView(view, 1, batch=_batch_of_one, repeats_epoch=True)
    return loader, _evaluation(strategy, tokenizer), steps * args.train.num_episodes * args.train.max_epochs


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


def _batch_of_one(items: list[tuple[Any, ...]]) -> tuple[list[Any], ...]:
    return tuple([field] for field in items[0])


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
