"""asyncdata under XTuner's RL: a loader of prompts for the ``SamplerConfig`` of a task.

::

    SamplerConfig(
        dataloader_cfg=PromptDataloaderConfig(
            source="prompts.jsonl",
            tokenize_fn=RLTextTokenizeFnConfig(max_length=2048),
            asyncdata={"num_workers": 2, "seed": 1},
        ),
        prompt_repeat_k=8,
    )

XTuner's own sampler repeats the prompts, gives groups of its replay buffer back by their status, and saves the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from asyncdata.core.errors import SnapshotError
from asyncdata.integrations.adapters import OfView, made_on_first_use
from asyncdata.integrations.torch.datasets import LoaderOrderView, view_of_rows
from asyncdata.tokenization.functions.prompt import PromptRowFn

__all__ = ("PromptDataloader", "PromptDataloaderConfig")  # noqa: F822 - the second is made below, as it imports XTuner

_NEXT = "next_prompt"


class PromptDataloader(OfView):
    """What XTuner's sampler takes as its ``Dataloader``: one prompt at a time, an epoch an iteration.

    XTuner begins with the epoch of a state again, also if it had seen its end: then an iteration is empty.

    :param view: gives ``RolloutState``.
    """

    def __init__(self, view: LoaderOrderView) -> None:
        self._view = view
        self._epoch = self._next = 0
        self._is_resumed = False

    def __iter__(self) -> Iterator[list[Any]]:
        """The rest of the epoch, or after its end the next one."""
        if self._next >= len(self) and not self._is_resumed:
            self._next = 0
        self._is_resumed = False
        while self._next < len(self):
            prompt = self._view[self._next]
            self._next += 1
            yield [prompt]

    def set_epoch(self, epoch: int) -> None:
        """Count the epochs as XTuner does. The order of the prompts continues by itself."""
        self._epoch = epoch

    def get_state_dict(self) -> dict[str, Any]:
        """The state after the last prompt. XTuner's sampler numbers its next group by ``step``."""
        step = self._epoch * len(self) + self._next
        own = {**self.state_dict(), _NEXT: self._next}
        return {"sampler": {"epoch": self._epoch, "step": step}, "asyncdata": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the prompt that would have come next.

        :raises SnapshotError: AD602 for a state of XTuner's own loader; or if it is of other data or settings.
        """
        if "asyncdata" not in state:
            raise SnapshotError(
                "AD602 the checkpoint of XTuner's sampler was saved with XTuner's own Dataloader, whose order is "
                "another: resume with that configuration, or begin without this checkpoint"
            )

        own = state["asyncdata"]
        super().load_state_dict({key: own[key] for key in own if key != _NEXT})
        self._next, self._is_resumed = own[_NEXT], True
        self._epoch = state["sampler"]["epoch"]


def _config() -> type:
    from xtuner.v1.datasets.config import DataloaderConfig

    class PromptDataloaderConfig(DataloaderConfig):  # type: ignore[misc]
        """Prompts of a task that a loader reads.

        :ivar source: what a :class:`~asyncdata.DataLoader` reads: rows as XTuner's RL takes them.
        :ivar tokenize_fn: XTuner's configuration of the function that makes a ``RolloutState`` of a row. Prompts of
            more tokens than its ``max_length`` are left out, as XTuner does; then the rows must be text.
        :ivar asyncdata: ``rows_per_epoch``, and settings of the loader. By default ``shuffle`` is ``"full"``.
        """

        source: Any
        tokenize_fn: Any
        asyncdata: dict[str, Any] = {}

        def build(self, tokenizer: Any, *_: Any, seed: int = 0, **__: Any) -> PromptDataloader:
            """The loader; called by XTuner.

            :raises ConfigError: for settings that cannot work.
            :raises SourceError: for files that cannot be read.
            """
            make = self.tokenize_fn.build(tokenizer, tokenizer_hash=self.tokenizer_hash)
            limit = getattr(make, "max_length", None)
            kept = limit and PromptRowFn(
                tokenizer.name_or_path,
                prompt_key="prompt",
                tool_key=None,
                metadata_key=None,
                apply_chat_template=True,
                max_length=limit,
                tools=getattr(make, "tools_schema", None) or None,
            )
            view = view_of_rows(
                LoaderOrderView,
                self.source,
                {"seed": seed, **self.asyncdata},
                item=lambda sample: make(dict(sample.extra)),
                tokenize_fn=kept or None,
                only_kept=bool(kept),
            )
            return PromptDataloader(view)

    return PromptDataloaderConfig


__getattr__ = made_on_first_use(__name__, "xtuner", {"PromptDataloaderConfig": _config})
