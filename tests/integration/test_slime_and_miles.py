"""The data sources of slime and miles beside ours: the same prompts, order, numbers, epochs, buffer and checkpoints.

What theirs deliver is recorded in ``tests/golden``. ASYNCDATA_SLIME and ASYNCDATA_MILES may name checkouts, of which
the code is run then too (see ``records``).
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from asyncdata.errors import NoSamplesError
from tests.support.peers.records import cases_of, plain
from tests.support.peers.rollouts import args_of, samples_of, saved, served, worked, write_lines, write_rows
from tests.support.slime_source import no_rollout, runs_in_miles, source_of

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")

WORKS = cases_of("slime_buffer")  # short ones, and a long one
WORKERS = [0, *(pytest.param(number, marks=pytest.mark.thorough) for number in (1, 2))]


def cases_of_both(kind):
    cases = [(peer, case) for peer in ("slime", "miles") for case in cases_of(f"{peer}_{kind}")]
    return [pytest.param(peer, case, id=f"{peer} {case}") for peer, case in cases]


def running_in(peer):
    return runs_in_miles() if peer == "miles" else contextlib.nullcontext()


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize(("peer", "case"), cases_of_both("order"))
def test_prompts_order_numbers_and_epochs_are_theirs(tmp_path, peer, case, num_workers):
    path, args = write_rows(tmp_path, case.given), args_of(tmp_path, case.given["args"])
    with running_in(peer), source_of(path, **args, asyncdata_num_workers=num_workers) as source:
        found = served(source, case.given["requests"])
    assert plain(found) == case.delivered(tmp_path)


@pytest.mark.parametrize("is_killed", [False, True], ids=["one process", "killed"])
@pytest.mark.parametrize("case", [*WORKS[:2], pytest.param(WORKS[2], marks=pytest.mark.thorough)], ids=str)
def test_what_is_given_back_is_served_again_as_slime_serves_it(tmp_path, case, is_killed):
    """Also by processes that each take over what the one before has saved, which slime forgets."""
    path, args = write_rows(tmp_path, case.given), args_of(tmp_path, case.given["args"])
    with contextlib.ExitStack() as stack:

        def resumed(source):
            source.save(0)
            source.close()
            another = stack.enter_context(source_of(path, **args))
            another.load(0)
            return another

        source = stack.enter_context(source_of(path, **args))
        more = (resumed,) if is_killed else ()
        found = worked(source, case.given["operations"], *more)

    assert plain(found) == case.delivered(tmp_path)


@pytest.mark.parametrize(("peer", "case"), cases_of_both("checkpoint"))
def test_they_can_read_our_checkpoint_and_we_read_theirs(tmp_path, peer, case):
    """Ours has what theirs has; and every second rollout begins from theirs."""
    pytest.importorskip("torch")
    expected = case.delivered(tmp_path)
    with running_in(peer):
        assert plain(saved(tmp_path, case.given, source_of, [state for _, state in expected])) == expected


@pytest.mark.parametrize(("peer", "case"), cases_of_both("rows"))
def test_rows_are_read_as_they_read_them(tmp_path, peer, case):
    """Rows of every shape, broken lines, media, tools, templates, and prompts that are too long."""
    args = args_of(tmp_path, case.given["args"] | {"asyncdata_processor": "tests.support.slime_source.process_media"})
    found: list[Any] = []
    path = write_lines(tmp_path, case.given["lines"])
    with running_in(peer), source_of(path, **args) as source, contextlib.suppress(NoSamplesError):
        found = samples_of(source)
    expected = expected_of(peer, case, tmp_path)
    # In an odd row, what pydantic turns into another value for miles is a bad row here.
    assert plain(found) == [sample for sample in expected if not case.given.get("odd") or sample in found]


def expected_of(peer, case, folder):
    """All samples of the file. Theirs are of one line each: a line that they do not start with is skipped by ours."""
    delivered, args = case.delivered(folder), case.given["args"]
    if not case.given.get("alone"):
        return delivered[0]  # type: ignore[no-any-return]

    lines = [
        (json.loads(line), samples) for line, samples in zip(case.given["lines"], delivered, strict=True) if samples
    ]
    return [sample for row, samples in lines if peer == "miles" or not is_refused(row, args) for sample in samples]


def is_refused(row, args):
    """Whether slime may take what is most likely a mistake: see ``SlimeTokenizeFn``."""
    prompt, has_media = row.get("input"), bool(args.get("multimodal_keys"))
    messages = prompt if isinstance(prompt, list) and args.get("apply_chat_template") else []
    return (
        "input" not in row
        or (isinstance(prompt, dict) and (has_media or bool(args.get("apply_chat_template"))))
        or (isinstance(row.get("images"), str | dict) and has_media)
        or not all(isinstance(message, dict) and message.get("role") is not None for message in messages)
    )


def test_a_byte_order_mark_costs_slime_its_first_row_and_us_none(tmp_path):
    with source_of(write_lines(tmp_path, ["\ufeff" + '{"input": "0"}', '{"input": "1"}']), label_key=None) as source:
        assert [sample.prompt for sample in source.dataset.samples] == ["0", "1"]
