"""Warnings about rows that are kept, from notes of the tokenize function: each is logged once per loader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdata.core.log import get_logger

if TYPE_CHECKING:
    from collections.abc import Container

__all__ = ("NotesLog",)

_log = get_logger(__name__)

_NO_STOP_TOKEN = (
    "of some rows no token is trained that ends what the assistant says, as the chat template writes none there, so "
    "the model does not learn from them to stop; pass chat_template= with the stop token inside {% generation %} and "
    "{% endgeneration %}, such as TRL's training template for the model (get_training_chat_template)"
)


class NotesLog:
    """Logs a warning when a note that needs one comes for the first time."""

    def __init__(self) -> None:
        self._was_logged = False

    def see(self, names: Container[str]) -> None:
        """Look at the names of the notes of a chunk."""
        if "no_stop_token" in names and not self._was_logged:
            self._was_logged = True
            _log.warning("chat.no_stop_token", reason=_NO_STOP_TOKEN)
