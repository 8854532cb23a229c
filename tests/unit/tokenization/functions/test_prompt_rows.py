"""PromptRowFn: the row as it is, unless its prompt is too long."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from asyncdata import PromptTokenizeFn
from asyncdata.tokenization.functions.prompt_rows import PromptRowFn
from tests.unit.tokenization import drops, faults, run, token_ids, values

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}!"


def row_of(text: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], "data_source": "sums", "metadata": "not looked at"}


def opened(folder: Path, max_length: int | None = None) -> Any:
    return PromptRowFn(
        str(folder), prompt_key="prompt", apply_chat_template=True, chat_template=TEMPLATE, max_length=max_length
    ).open()


def test_a_row_is_kept_as_it_is_and_without_tokens(small_tokenizer: Path) -> None:
    rows = [row_of("one"), b"\xef\xbb\xbf" + json.dumps(row_of("two")).encode()]

    chunk = run(opened(small_tokenizer), rows)

    assert values(chunk, "extra") == [row_of("one"), row_of("two")]
    assert token_ids(chunk) == [[], []]
    assert (faults(chunk), drops(chunk)) == ([], {})


def test_a_prompt_is_dropped_exactly_if_it_has_more_tokens_than_max_length(small_tokenizer: Path) -> None:
    rows = [row_of("a " * number) for number in range(1, 12)]
    prompts = PromptTokenizeFn(
        str(small_tokenizer), prompt_key="prompt", apply_chat_template=True, chat_template=TEMPLATE, metadata_key=None
    )
    lengths = [len(ids) for ids in token_ids(run(prompts.open(), rows))]
    limit = sorted(lengths)[5]

    chunk = run(opened(small_tokenizer, limit), rows)

    kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
    assert 0 < len(kept) < len(rows)
    assert values(chunk, "extra") == kept
    assert list(drops(chunk)) == ["max_length"]


def test_a_row_without_a_chat_is_bad(small_tokenizer: Path) -> None:
    chunk = run(opened(small_tokenizer), [{"prompt": 3}, {"other": []}])

    assert len(faults(chunk)) == 2


def test_its_tag_and_the_fingerprint_of_its_settings_are_pinned() -> None:
    """Another one would refuse every snapshot there is."""
    fn = PromptRowFn("t", prompt_key="prompt", apply_chat_template=True, max_length=512)

    assert fn.tag == "asyncdata:PromptRowFn"
    assert fn.settings_digest() == "98cc485b85e31a5111fe77fae13ba37f"
    shared = {name: value for name, value in fn.settings().items() if name != "tools"}
    assert fn.settings_digest() != PromptTokenizeFn(**shared).settings_digest()
