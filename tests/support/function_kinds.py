"""Every tokenize function with a tokenizer, and a row for it. Nothing heavy is imported: a test looks at what is."""

from collections.abc import Callable
from typing import Any, NamedTuple

from asyncdata import ChatTokenizeFn, FixedLengthTokenizeFn, PreferenceTokenizeFn, PromptTokenizeFn, TextTokenizeFn

END = "<|im_end|>"
CAFE = [{"role": "user", "content": "What is café?"}, {"role": "assistant", "content": "It is four."}]
ASKED = f"<|im_start|>user\nWhat is café?{END}\n<|im_start|>assistant\n"


class Kind(NamedTuple):
    """A tokenize function of a tokenizer's folder and settings; a row, and its ``key`` of which most of the tokens are;
    their text without padding, and what of it is trained, None if samples have no labels."""

    make: Callable[..., Any]
    row: dict[str, Any]
    key: str
    text: str
    trained: str | None


def chat_prompt(folder: str, **more: Any) -> PromptTokenizeFn:
    return PromptTokenizeFn(folder, apply_chat_template=True, **more)


def fixed_length(folder: str, **more: Any) -> FixedLengthTokenizeFn:
    return FixedLengthTokenizeFn(folder, **{"max_length": 64, "prompt": "{q}", "answer": "{a}", **more})


PAIR = {"prompt": "What is it?", "chosen": " It is four.", "rejected": " It is café."}
KINDS = {
    "prompt": Kind(PromptTokenizeFn, {"input": "What is café?"}, "input", "What is café?", None),
    "chat prompt": Kind(chat_prompt, {"input": CAFE[:1]}, "input", ASKED, None),
    "text": Kind(
        TextTokenizeFn, {"text": f"{END}What is café?"}, "text", f"{END}What is café?{END}", f"What is café?{END}"
    ),
    "chat": Kind(
        ChatTokenizeFn, {"messages": CAFE}, "messages", f"{ASKED}It is four.{END}\n", f"It is four.{END}"
    ),
    "pair": Kind(PreferenceTokenizeFn, PAIR, "chosen", f"What is it? It is four.{END}", f" It is four.{END}"),
    "fixed length": Kind(
        fixed_length, {"q": "What is café?", "a": " It is four."}, "q", f"What is café? It is four.{END}",
        f" It is four.{END}",
    ),
}  # fmt: skip
