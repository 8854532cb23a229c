"""Tokenize functions as they are written for XTuner, at module level so that a worker can import them."""

from __future__ import annotations

from typing import Any


class Characters:
    """One token a character; ``hash()`` leaves ``max_length`` out, as XTuner's own do."""

    def __init__(self, max_length: int = 8, name: str = "characters") -> None:
        self.max_length = max_length
        self.name = name
        self.state = "runtime"

    def set_state(self, state: str) -> None:
        self.state = state

    def hash(self) -> str:
        return f"hash of {self.name}"

    def __call__(self, item: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        ids = [ord(char) for char in item["text"]][: self.max_length]
        if self.state == "cache":
            return {"num_tokens": len(ids), "proxy_attn_flops": 1.0}

        labels = [-100, *ids[1:]]
        return {"input_ids": ids, "labels": labels, "num_tokens": len(ids), "char_start": 0}


class Returns:
    """Gives what it was made with."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def hash(self) -> str:
        return "returns"

    def __call__(self, item: dict[str, Any]) -> Any:
        return self.result


def counting() -> Characters:
    """One that was last used to count."""
    made = Characters()
    made.set_state("cache")
    return made


ready = Characters(3)


class Numbered:
    """As many tokens as a row says, which tell its number and their places. The first third is not trained."""

    EACH = 1000

    def set_state(self, state: str) -> None: ...

    def hash(self) -> str:
        return "numbered"

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        first = item["number"] * self.EACH
        ids = [*range(first, first + item["tokens"])]
        masked = len(ids) // 3
        return {"input_ids": ids, "labels": [-100] * masked + ids[masked:], "num_tokens": len(ids)}
