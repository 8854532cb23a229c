"""The data source inside slime: prompts, order and checkpoints as those of slime and miles; rewards are remembered."""

import asyncio
import contextlib
import json
from typing import Any

import pytest

from asyncdata.errors import ConfigError, NoSamplesError
from asyncdata.integrations.slime import report_outcomes
from tests.support.faults import Program
from tests.support.peers.records import cases_of, plain
from tests.support.peers.rollouts import args_of, samples_of, saved, served, worked, write_lines, write_rows
from tests.support.slime_source import labels, no_rollout, runs_in_miles, source_of, write_prompts

pytestmark = pytest.mark.usefixtures("no_rollout")

__all__ = ("no_rollout",)


@pytest.mark.thorough
def test_a_process_that_never_closes_it_ends_without_a_word(tmp_path):
    """slime has no call for it; a Ray actor just ends."""
    path = write_prompts(tmp_path / "p.jsonl", 50)
    code = (
        "from tests.support.slime_source import args_for\n"
        "from asyncdata.integrations.slime import AsyncDataSource\n"
        f"source = AsyncDataSource(args_for({str(path)!r}, asyncdata_num_workers=1, asyncdata_order='stream'))\n"
        "source.get_samples(3)\n"
    )
    with Program("-c", code, options=("-W", "error")) as program:
        assert program.end() == (0, "")
        program.assert_gone()


@pytest.mark.thorough
def test_it_may_be_called_from_a_thread_that_runs_a_loop(tmp_path):
    """As slime's rollout does: from a coroutine, while others of the same loop go on afterwards."""
    path = write_prompts(tmp_path / "p.jsonl", 50)

    async def rollout(source):
        groups = source.get_samples(4)
        await asyncio.gather(*(asyncio.sleep(0) for _ in groups))
        source.add_samples(groups[2:])
        return groups[:2]

    with source_of(path, asyncdata_num_workers=1) as source:
        done = asyncio.run(rollout(source)) + asyncio.run(rollout(source))
        assert labels(done) == ["0", "1", "2", "3"]


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

    lines = [(json.loads(line), some) for line, some in zip(case.given["lines"], delivered, strict=True) if some]
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


NUM_ROWS = 24
SOLVED = {"policy": {"drop_above": 0.9}}


@pytest.fixture
def prompts(tmp_path):
    return write_prompts(tmp_path / "prompts.jsonl", NUM_ROWS)


def finish(groups, *, reward=None):
    """Finished groups: even rows are solved."""
    for group in groups:
        for sample in group:
            sample.status = type(sample.status)("completed")
            sample.reward = float(int(sample.label) % 2 == 0) if reward is None else reward(sample)
    return groups


def rollout(source, num_groups=4):
    """As slime does it: all finished groups go to the function that ``--rollout-all-samples-process-path`` names.

    The part of a mixture and the label of each.
    """
    groups = finish(source.get_samples(num_groups))
    report_outcomes(source.args, groups, source.get_samples)
    return [(group[0].metadata.get("source_name", ""), group[0].label) for group in groups]


def run(path, num_groups, **given):
    """What twelve rollouts take, of which some are run again from the checkpoint before, and take the same."""
    taken = []
    with source_of(path, **given) as source:
        for number in range(12):
            taken.append(rollout(source, num_groups))
            source.save(number)
    for number in (10, 7, 4):
        with source_of(path, **given) as source:
            source.load(number)
            assert rollout(source, num_groups) == taken[number + 1]
    return taken


def rows(taken, part=""):
    return [int(label) for groups in taken for name, label in groups if name == part]


@pytest.fixture
def given(tmp_path):
    return {"save": str(tmp_path), "load": str(tmp_path), "asyncdata_outcomes": SOLVED}


@pytest.mark.parametrize("order", ["legacy", "stream"])
def test_solved_prompts_are_left_out_and_a_restart_continues_the_run(prompts, given, order):
    taken = run(prompts, 4, **given, n_samples_per_prompt=3, rollout_shuffle=True, asyncdata_order=order)
    assert sorted(rows(taken[:6])) == list(range(NUM_ROWS))
    assert sorted(rows(taken[6:9])) == list(range(1, NUM_ROWS, 2))


def test_each_part_of_a_mixture_remembers_its_own_prompts_and_a_restart_continues_the_run(given, tmp_path):
    for name, number in (("math", 16), ("code", 8)):
        write_prompts(tmp_path / f"{name}.jsonl", number)
    parts = {"math": {"source": "math.jsonl", "weight": 3}, "code": "code.jsonl"}
    (tmp_path / "mix.json").write_text(json.dumps({"quota": 8, "parts": parts}))
    taken = run(None, 8, **given, n_samples_per_prompt=2, asyncdata_mix=str(tmp_path / "mix.json"))
    # Of the rollout in which an epoch begins, scores are too late for it.
    assert sorted(rows(taken, "math")[:16]) == list(range(16))
    assert {row % 2 for row in rows(taken, "math")[40:]} == {1}


def test_groups_that_come_back_finished_are_reported_and_aborted_ones_are_not(prompts):
    with source_of(prompts, n_samples_per_prompt=2, asyncdata_outcomes=SOLVED) as source:
        done, aborted = source.get_samples(2)
        finish([done])
        for sample in aborted:
            sample.status, sample.reward = type(sample.status)("aborted"), 1.0
        source.add_samples([done, aborted])
        numbers = source.statistics()
        assert (numbers["asyncdata_outcome_rows"], numbers["asyncdata_outcome_scores_total"]) == (1, 2)
        report_outcomes(source.args, source.get_samples(2), source)
        assert source.statistics()["asyncdata_outcome_repeated_total"] == 2


def test_tracked_groups_are_reported_when_they_are_consumed_or_dropped(prompts):
    with source_of(prompts, asyncdata_outcomes=SOLVED) as source:
        source.track_groups()
        consumed, dropped, aborted = source.get_samples(3)
        finish([consumed, dropped])
        source.consume_group(consumed)
        source.drop_group(dropped, "dynamic_filter")
        source.drop_group(aborted, "aborted")
        assert source.statistics()["asyncdata_outcome_rows"] == 2


def test_a_reward_is_found_by_its_key_and_what_is_none_is_left_out(prompts):
    rewards = iter([{"math": 1.0}, {"style": 1.0}, None, float("nan"), "good"])
    with source_of(prompts, reward_key="math", asyncdata_outcomes=SOLVED) as source:
        groups = finish(source.get_samples(5), reward=lambda _: next(rewards))
        assert source.report(groups) == 1


def test_of_a_sample_that_became_several_the_last_one_counts(prompts):
    with source_of(prompts, n_samples_per_prompt=2, asyncdata_outcomes=SOLVED) as source:
        ((first, second),) = finish(source.get_samples(1))
        assert source.report([[[first, first], [second]]]) == 2


def test_a_sample_has_its_row_in_its_metadata_only_where_outcomes_are_remembered(prompts):
    with source_of(prompts) as source:
        (plain,) = source.get_samples(1)[0]
        assert source.report(finish([[plain]])) == 0
    with source_of(prompts, asyncdata_outcomes=SOLVED) as source:
        (tagged,) = source.get_samples(1)[0]
        assert "asyncdata_row" not in source.dataset.samples[0].metadata
    assert tagged.metadata == {**plain.metadata, "asyncdata_row": [0, 0]}


def test_another_number_of_ranks_takes_the_memory_over(prompts):
    with source_of(prompts, asyncdata_outcomes=SOLVED) as source:
        rollout(source)
        source.set_train_parallel_config({"dp_size": 2})
        rollout(source)
        source.set_train_parallel_config({"dp_size": 1})
        assert source.statistics()["asyncdata_outcome_rows"] == 8


def test_a_data_source_of_others_is_refused():
    with pytest.raises(ConfigError, match="--data-source-path"):
        report_outcomes(None, [], object())
