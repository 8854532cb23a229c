"""Makes ``multimodal_inputs`` by slime's own code, from the media of a row."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any

from asyncdata.core.errors import ConfigError
from asyncdata.integrations.slime.config import import_by_path
from asyncdata.integrations.slime.driver import package_of
from asyncdata.integrations.slime.sample import resolve_sample_type

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdata.integrations.slime.config import SlimeSettings

__all__ = ("media_process", "process")

AS_SLIME_DOES = "asyncdata.integrations.slime.media:process"


def media_process(args: Any, settings: SlimeSettings) -> Callable[[dict[str, Any]], Any] | None:
    """The function that makes ``multimodal_inputs`` of a row's media; None if rows have no media.

    :raises ConfigError: if ``asyncdata_processor`` cannot be imported.
    """
    fn = settings.tokenize_fn
    if fn is None or not (fn.shows_media or fn.multimodal_keys is not None):
        return None

    return functools.partial(import_by_path(settings.options.processor or AS_SLIME_DOES), args)


def process(args: Any, media: dict[str, list[Any]]) -> Any:
    """The result of slime's ``process_vision_info`` for a chat with ``media``.

    That function reads only the media of a chat, so one message with all of them is enough.

    :param media: ``{"images": [...], "videos": [...], "audios": [...]}``, with the row's values.
    :raises ConfigError: if the model's processor cannot be loaded. slime would continue without the images.
    """
    parts = [
        item if isinstance(item, dict) else {"type": name.removesuffix("s"), name.removesuffix("s"): item}
        for name, items in media.items()
        for item in items
    ]
    return _slimes().process_vision_info([{"role": "user", "content": parts}], _processor(args.hf_checkpoint))


def _slimes() -> Any:
    """The module for media of slime, or of miles, if miles runs the data source."""
    name = f"{package_of(resolve_sample_type()) or 'slime'}.utils.processing_utils"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # it is installed, and cannot import something else

        raise ConfigError(
            f"multimodal_inputs are made by {name}, which is not installed; give asyncdata_processor: the import path "
            "of a function of (args, media) that makes them"
        ) from error


@functools.cache
def _processor(checkpoint: str) -> Any:
    processor = _slimes().load_processor(checkpoint)
    if processor is None:
        raise ConfigError(
            f"multimodal_keys need a processor, and {checkpoint} has none that loads without code of its own; give "
            "asyncdata_processor: the import path of a function of (args, media) that makes multimodal_inputs"
        )

    return processor
