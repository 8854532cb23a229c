"""The error of a tokenizer backend that was found out. It stands alone: who catches it need not load tokenizers."""

from __future__ import annotations

from asyncdata.errors import ConfigError

__all__ = ("WrongIdsError",)


class WrongIdsError(ConfigError):
    """A backend that was proven gave other ids than ``tokenizers``: no row's fault, and nothing to be passed over."""
