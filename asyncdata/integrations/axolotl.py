"""asyncdata under axolotl: a plugin whose loader the trainer reads, with its state in the trainer's checkpoints.

::

    plugins: [asyncdata.integrations.axolotl.AsyncDataPlugin]
    asyncdata_loader: my_data.make_loader  # make_loader(cfg) -> DataLoader
    max_steps: 1000

axolotl then prepares no data of its own. See :func:`asyncdata.integrations.transformers.attach` for the loader.
"""

from __future__ import annotations

import importlib
from typing import Any

from asyncdata.core.errors import ConfigError
from asyncdata.integrations.adapters import made_on_first_use, refuse
from asyncdata.integrations.transformers import attach, placeholder

__all__ = ("AsyncDataArgs", "AsyncDataPlugin", "LoaderPlugin")  # noqa: F822 - made below, as they import axolotl

_NOT_FOLLOWED = {
    "sample_packing": "the loader packs: give it packing=",
    "val_set_size": "the plugin makes no validation data",
    "test_datasets": "the plugin makes no validation data",
    "streaming": "the loader reads as it goes",
}


class LoaderPlugin:
    """What the plugin does in axolotl's hooks."""

    def get_input_args(self) -> str:
        """The class that adds ``asyncdata_loader`` to axolotl's configuration."""
        return f"{__name__}.AsyncDataArgs"

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> Any:
        """A data set that is never read, so that axolotl prepares none.

        :raises ConfigError: AD462, for settings that cannot work.
        """
        from axolotl.common.datasets import TrainDatasetMeta

        self.check(cfg)
        return TrainDatasetMeta(placeholder(), None, cfg.max_steps)

    def check(self, cfg: Any) -> None:
        """Refuse settings that cannot work, before a model is loaded.

        :raises ConfigError: AD462; it names the setting.
        """
        if "." not in (cfg.asyncdata_loader or ""):
            raise ConfigError(
                "AD462 the configuration has no asyncdata_loader: the function that makes the loader, such as "
                "my_data.make_loader"
            )

        if not cfg.max_steps:
            raise ConfigError(
                "AD462 the configuration has no max_steps, and a loader has no length. For n epochs of m rows it is "
                "n * m // (micro_batch_size * gradient_accumulation_steps * ranks)"
            )

        refuse(cfg, _NOT_FOLLOWED, "AD462 {name} is not followed, leave it out: {reason}")

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Make the loader, and attach it to the trainer.

        :raises ConfigError: for arguments that cannot work; it names them.
        """
        module, _, name = cfg.asyncdata_loader.rpartition(".")
        attach(trainer, getattr(importlib.import_module(module), name)(cfg))


def _args() -> type:
    from pydantic import create_model

    made: type = create_model("AsyncDataArgs", asyncdata_loader=(str | None, None))
    return made


__getattr__ = made_on_first_use(
    __name__,
    "axolotl",
    {"AsyncDataPlugin": (LoaderPlugin, "axolotl.integrations.base:BasePlugin"), "AsyncDataArgs": _args},
)
