"""What tokenize functions note of rows that are kept, and that the user should hear of: said once a loader."""

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
    """Logs the note that is to be heard of, when it first comes."""

    def __init__(self) -> None:
        self._has_said = False

    def see(self, names: Container[str]) -> None:
        """Some rows that were tokenized have these notes."""
        if "no_stop_token" in names and not self._has_said:
            self._has_said = True
            _log.warning("chat.no_stop_token", reason=_NO_STOP_TOKEN)
