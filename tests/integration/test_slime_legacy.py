"""slime's own data source beside ours: the same prompts, order, numbers, epochs, buffer and checkpoints.

What slime delivers is recorded in ``tests/golden``; ASYNCDATA_SLIME may name a checkout of it (see ``records``).
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import NoSamplesError
from tests.support.peers.records import Case, cases_of, plain
from tests.support.peers.rollouts import args_of, samples_of, saved, served, worked, write_lines, write_rows
from tests.support.slime_source import no_rollout, source_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")

WORKS = cases_of("slime_buffer")  # short ones, and a long one
WORKERS = [0, pytest.param(1, marks=pytest.mark.thorough), pytest.param(2, marks=pytest.mark.thorough)]


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("case", cases_of("slime_order"), ids=str)
def test_prompts_order_numbers_and_epochs_are_slimes(tmp_path: Path, case: Case, num_workers: int) -> None:
    path, args = write_rows(tmp_path, case.given), args_of(tmp_path, case.given["args"])
    with source_of(path, **args, asyncdata_num_workers=num_workers) as source:
        found = served(source, case.given["requests"])

    assert plain(found) == case.delivered(tmp_path)


@pytest.mark.parametrize("is_killed", [False, True], ids=["one process", "killed"])
@pytest.mark.parametrize("case", [*WORKS[:2], pytest.param(WORKS[2], marks=pytest.mark.thorough)], ids=str)
def test_what_is_given_back_is_served_again_as_slime_serves_it(tmp_path: Path, case: Case, is_killed: bool) -> None:
    """Also by processes that each take over what the one before has saved, which slime forgets."""
    path, args = write_rows(tmp_path, case.given), args_of(tmp_path, case.given["args"])
    with contextlib.ExitStack() as stack:

        def resumed(source: Any) -> Any:
            source.save(0)
            source.close()
            another = stack.enter_context(source_of(path, **args))
            another.load(0)
            return another

        source = stack.enter_context(source_of(path, **args))
        more = (resumed,) if is_killed else ()
        found = worked(source, case.given["operations"], *more)

    assert plain(found) == case.delivered(tmp_path)


@pytest.mark.parametrize("case", cases_of("slime_checkpoint"), ids=str)
def test_slime_can_read_our_checkpoint_and_we_read_slimes(tmp_path: Path, case: Case) -> None:
    """Ours has what slime's has; and every second rollout begins from slime's own."""
    expected = case.delivered(tmp_path)

    assert plain(saved(tmp_path, case.given, source_of, [state for _, state in expected])) == expected


@pytest.mark.parametrize("case", cases_of("slime_rows"), ids=str)
def test_rows_are_read_as_slime_reads_them(tmp_path: Path, case: Case) -> None:
    """Rows of every shape, broken lines, media, tools, templates, and prompts that are too long."""
    args = args_of(tmp_path, case.given["args"] | {"asyncdata_processor": "tests.support.slime_source.process_media"})
    found: list[Any] = []
    with source_of(write_lines(tmp_path, case.given["lines"]), **args) as source, contextlib.suppress(NoSamplesError):
        found = samples_of(source)

    assert plain(found) == expected_of(case, tmp_path)


def expected_of(case: Case, folder: Path) -> list[Any]:
    """All samples of the file. slime's are of one line each: a line that it does not start with is skipped by ours."""
    delivered, args = case.delivered(folder), case.given["args"]
    if not case.given.get("alone"):
        return delivered[0]  # type: ignore[no-any-return]

    lines = zip(case.given["lines"], delivered, strict=True)
    return [
        sample for line, samples in lines if samples and not is_refused(json.loads(line), args) for sample in samples
    ]


def is_refused(row: dict[str, Any], args: dict[str, Any]) -> bool:
    """Whether slime may take what is most likely a mistake: see ``SlimeTokenizeFn``."""
    prompt, has_media = row.get("input"), bool(args.get("multimodal_keys"))
    messages = prompt if isinstance(prompt, list) and args.get("apply_chat_template") else []
    return (
        "input" not in row
        or (isinstance(prompt, dict) and (has_media or bool(args.get("apply_chat_template"))))
        or (isinstance(row.get("images"), str | dict) and has_media)
        or not all(isinstance(message, dict) and message.get("role") is not None for message in messages)
    )


def test_a_byte_order_mark_costs_slime_its_first_row_and_us_none(tmp_path: Path) -> None:
    with source_of(write_lines(tmp_path, ["\ufeff" + '{"input": "0"}', '{"input": "1"}']), label_key=None) as source:
        assert [sample.prompt for sample in source.dataset.samples] == ["0", "1"]
