"""Renderers that worker processes import by path: a token for each character, and one for each role and end."""

from typing import Any, NamedTuple

END = 9
ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 5}


class Rendered(NamedTuple):
    token_ids: list[int]
    sampled_mask: list[bool]
    message_indices: list[int]


class Characters:
    """``offset`` moves all characters; with ``ends=False`` no message has an end."""

    def __init__(self, folder: str, *, offset: int = 0, ends: bool = True) -> None:
        self.folder, self._offset, self._ends = folder, offset, ends

    def render(
        self, messages: list[dict[str, Any]], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        found: list[tuple[int, bool, int]] = [(100 + len(tool["name"]), False, -1) for tool in tools or ()]
        for number, message in enumerate(messages):
            is_sampled = message["role"] == "assistant"
            body = [ord(char) + self._offset for char in message["content"]] + [END] * self._ends
            found.append((ROLES[message["role"]], False, number))
            found += [(one, is_sampled, number) for one in body]
        if add_generation_prompt:
            found.append((ROLES["assistant"], False, -1))
        return Rendered(*map(list, zip(*found, strict=True)))

    def get_stop_token_ids(self) -> list[int]:
        return [END]


class Maskless(Characters):
    """As a renderer of a template, which does not know what is sampled."""

    def render(self, *args: Any, **more: Any) -> Rendered:
        return super().render(*args, **more)._replace(sampled_mask=[])


characters, maskless = Characters, Maskless
