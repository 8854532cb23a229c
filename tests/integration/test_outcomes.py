"""Outcomes: rows are left out of later epochs by their scores, or by one of several rewards; a resume is exact."""

import json
import os
import tempfile
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from asyncdata import JsonlSource, Mix, Outcomes, Part, PassRate, Sample, SoftPacking, errors
from tests.support.examples import in_ci
from tests.support.loaders import make
from tests.support.loading import ids, write_rows
from tests.support.parts import main

NUM_ROWS = 60
SOLVED = PassRate(drop_above=0.9, revisit_every=3)


def step(loader, num_groups=5):
    """Take groups, report them, and return their rows. Every second row is solved; the others never."""
    groups = loader.get_samples(num_groups)
    rows = ids(group[0] for group in groups)
    loader.report(groups, [[float(row % 2)] * 2 for row in rows])
    return rows


def remembering(rows, policy=SOLVED, **knobs):
    """Two samples of each prompt, and solved prompts are left out."""
    return make(rows, **{"n_samples_per_prompt": 2, "outcomes": Outcomes(policy=policy)} | knobs)


def run(loader, num_steps):
    """The rows of each step, and the state after it, as JSON gives it back."""
    taken, states = [], [json.loads(json.dumps(loader.state_dict()))]
    for _ in range(num_steps):
        taken.append(step(loader))
        states.append(json.loads(json.dumps(loader.state_dict())))
    return taken, states


def test_a_solved_row_of_a_file_that_is_listed_twice_comes_by_neither(tmp_path):
    source = JsonlSource([str(write_rows(tmp_path / "rows.jsonl", 6))] * 2, allow_repeats=True)
    with make(source, shuffle=False, num_workers=0, outcomes=Outcomes(policy=PassRate(drop_above=0.9))) as loader:
        batch = loader.get_next_batch(12)
        loader.report(batch, [float(row % 2) for row in ids(batch)])
        assert ids(loader.get_next_batch(12)) == [0, 2, 4] * 4


def test_what_is_reported_after_an_epoch_has_begun_counts_for_the_next_one(rows, tmp_path):
    with make(rows, outcomes=Outcomes(policy=PassRate(drop_above=0.9))) as loader:
        late = loader.get_samples(NUM_ROWS)
        second = loader.get_samples(1)
        loader.report(late, [1.0] * NUM_ROWS)
        second += loader.get_samples(NUM_ROWS - 1)
        assert len(set(ids(group[0] for group in second))) == NUM_ROWS
        with pytest.raises(errors.NoSamplesError, match=r"AD401 epoch 2: 60 .* 0 kept: 60 by excluded.*Outcomes\(pol"):
            loader.get_samples(1)


def losses_of(samples):
    """Rows of 0 modulo 4 are learnt from the second epoch on, those of 1 never, and the others now and then."""
    found = []
    for sample in samples:
        kind, epoch = ids([sample])[0] % 4, sample.position.epoch
        found.append({0: 0.05 if epoch else 2.0, 1: 9.0}.get(kind, 0.05 if epoch % 2 else 1.0))
    return found


def test_rows_that_are_learnt_or_never_learnt_are_left_out_of_later_epochs_of_sft_and_a_resume_is_exact(rows):
    policy = PassRate(drop_below=0.1, drop_above=8.0, epochs=3)
    settings = {"outcomes": Outcomes(policy=policy), "epochs": 5}

    def train(loader, num_batches):
        taken = []
        with suppress(errors.EndOfData):
            for _ in range(num_batches):
                batch = loader.get_next_batch(5)
                loader.report(batch, losses_of(batch))
                taken += [(sample.position.epoch, *ids([sample])) for sample in batch]
        return taken

    with capture_logs() as logs, make(rows, **settings) as loader:
        whole = train(loader, 99)
        assert loader.statistics().dropped_total == {"excluded": 15 + 30}  # never learnt; and learnt in epochs 1, 2, 3
    for epoch in range(5):
        gone = {1} if epoch == 3 else {0, 1} if epoch == 4 else set()
        assert sorted(row for of, row in whole if of == epoch) == [row for row in range(60) if row % 4 not in gone]
    decided = [(log.get("num_low", 0), log.get("num_high", 0)) for log in logs if log["event"] == "outcomes.decided"]
    assert decided == [(0, 0), (0, 0), (0, 0), (0, 15), (15, 15)]

    taken, state = [], None
    for num_batches in (7, 20, 15, 8, 99):
        with make(rows, **settings) as loader:
            if state is not None:
                loader.load_state_dict(state)
            taken += train(loader, num_batches)
            state = json.loads(json.dumps(loader.state_dict()))
            train(loader, 2)  # not in the state
    assert taken == whole


def seen(row):
    """Writes the rows that are tokenized into a file, one byte each."""
    with open(os.environ["ASYNCDATA_TEST_SEEN"], "ab") as file:
        file.write(b".")
    return [row["id"]]


def test_rows_that_are_left_out_are_not_tokenized(tmp_path, monkeypatch):
    rows, log = write_rows(tmp_path / "rows.jsonl", 400), tmp_path / "seen"
    monkeypatch.setenv("ASYNCDATA_TEST_SEEN", str(log))
    knobs = {"buffer_size": 20, "outcomes": Outcomes(policy=PassRate(drop_above=0.9)), "epochs": 2}
    with make(rows, seen, **knobs) as loader:
        for _ in range(40):
            groups = loader.get_samples(10)
            loader.report(groups, [float(group[0].tokens[0] % 10 != 0) for group in groups])
        assert len(ids(loader.get_next_batch(40))) == 40
    ahead, canaries = 2 * 20, 8  # of the second epoch, what was read ahead before it began was tokenized whole
    assert 440 <= len(log.read_bytes()) <= 400 + 40 + ahead + canaries


def test_a_resume_keeps_the_numbers_of_scores_that_were_not_counted(rows):
    settings = {"outcomes": Outcomes()}
    with make(rows, **settings) as loader:
        first = loader.get_samples(NUM_ROWS)
        loader.report(loader.get_samples(NUM_ROWS), [1.0] * NUM_ROWS)
        assert loader.report(first[:7], [1.0] * 7) == 0, "their rows have scores of the next epoch"
        again = loader.get_samples(2)
        assert [loader.report(again, [1.0] * 2) for _ in range(2)] == [2, 0]
        state = json.loads(json.dumps(loader.state_dict()))
    with make(rows, **settings) as loader:
        loader.load_state_dict(state)
        found = loader.statistics()
        assert (found.outcome_late_total, found.outcome_repeated_total) == (7, 2)


def test_a_loader_that_remembers_nothing_refuses_a_state_with_outcomes(rows):
    with remembering(rows) as loader:
        state = run(loader, 14)[1][-1]
    with remembering(rows, outcomes=None) as loader:
        with pytest.raises(errors.SnapshotMismatchError, match=r"AD603.*outcomes of 60 rows.*outcomes=Outcomes"):
            loader.load_state_dict(state)
        loader.load_state_dict(state, allow_changed={"outcomes"})
        assert loader.get_samples(1)


def test_a_damaged_memory_in_a_state_is_refused(rows, tmp_path):
    with remembering(rows) as loader:
        state = run(loader, 2)[1][-1]
        for memory in ("!\n", "AAAA"):
            with pytest.raises(errors.SnapshotError):
                loader.load_state_dict({**state, "outcomes": {**state["outcomes"], "memory": memory}})
        assert loader.statistics().outcome_rows == 10, "nothing has changed"


def test_with_other_data_the_memory_is_forgotten_and_that_is_logged_and_other_names_keep_it(rows, tmp_path):
    with remembering(rows) as loader:
        taken, states = run(loader, 16)
    moved, other = rows.rename(tmp_path / "moved.jsonl"), write_rows(tmp_path / "other.jsonl", NUM_ROWS + 1)
    with remembering(moved) as loader:
        loader.load_state_dict(states[13], same_rows=True)
        assert [step(loader) for _ in range(3)] == taken[13:]
        state = loader.state_dict()
    with remembering(other) as loader, capture_logs() as logs:
        loader.load_state_dict(state, allow_changed={"data"})
        assert loader.statistics().outcome_rows == 0
    assert [entry["reason"] for entry in logs if entry["event"] == "outcomes.forgotten"] == ["changed: data"]


def test_packs_and_ranks_of_their_own_are_refused(rows, tmp_path):
    packing, ranks = {"packing": SoftPacking(max_length=64)}, {"ranks": {"world_size": 2}}
    for exchange, knobs, way_out in (
        (None, packing, "leave out packing"),
        (None, ranks, r"exchange=.*dp_size"),
        (lambda data: [data] * 2, packing | ranks, "packs"),
    ):
        with pytest.raises(errors.ConfigError, match=rf"AD480.*{way_out}"):
            make(rows, outcomes=Outcomes(policy=SOLVED, exchange=exchange), batch_size=1, **knobs)
    with pytest.raises(errors.ConfigError, match="exchange is a function of bytes"):
        Outcomes(exchange=5)


def test_a_report_is_counted_whole_or_not_at_all(rows, tmp_path):
    with remembering(rows) as loader:
        groups = loader.get_samples(2)
        refused: list[tuple[list[Any], Any]] = [
            (groups, [1.0]),
            (groups, [1.0, [1.0]]),
            (groups, [1.0, float("nan")]),
            (groups, [1.0, "good"]),
            (groups, [1.0, ["1", b"0"]]),
            (groups, None),
            ([groups[0], [Sample()]], [1.0, 1.0]),
        ]
        for items, scores in refused:
            with pytest.raises(errors.InvalidGroupError, match="AD482"):
                loader.report(items, scores)
        assert loader.statistics().outcome_rows == 0

        assert loader.report(groups[1:], [np.array(0.5)]) == 2, "a number of numpy"
        groups[0][0].reward, groups[0][1].reward = 1.0, 0
        assert loader.report(groups[:1]) == 2
        assert loader.report(groups[0]) == 0, "samples without their group are the same"
        assert [loader.report([[one]], [1.0]) for one in loader.get_samples(1)[0]] == [1, 1], "each is another attempt"


def test_samples_of_another_loader_and_reports_without_outcomes_are_refused(rows, tmp_path):
    with make(write_rows(tmp_path / "other.jsonl", 5)) as loader:
        foreign = loader.get_next_batch(1)
        with pytest.raises(errors.ConfigError, match="AD483"):
            loader.report(foreign, [1.0])
    with make(rows, outcomes=Outcomes(policy=SOLVED)) as loader:
        with pytest.raises(errors.InvalidGroupError, match=r"AD482.*other\.jsonl"):
            loader.report(foreign, [1.0])


def test_an_epoch_that_begins_again_is_decided_anew(rows):
    with make(rows, outcomes=Outcomes(policy=PassRate(drop_above=0.9))) as loader:
        batch = loader.get_next_batch(NUM_ROWS)
        loader.report(batch, [float(row % 2) for row in ids(batch)])
        loader.set_epoch(0)
        assert sorted(ids(loader.get_next_batch(30))) == list(range(0, NUM_ROWS, 2))


@pytest.mark.parametrize("is_mixture", [False, True])
def test_groups_that_were_out_in_an_earlier_epoch_come_again_and_no_begun_epoch_is_decided_anew(tmp_path, is_mixture):
    path = write_rows(tmp_path / "rows.jsonl", 10)
    source = Mix({"only": path}) if is_mixture else path
    knobs = {"commit": "on_ack", "shuffle": False, "outcomes": Outcomes(policy=PassRate(drop_above=0.9))}
    rows_of = lambda groups: ids(group[0] for group in groups)  # noqa: E731
    with make(source, **knobs) as loader:
        first = loader.get_samples(10)
        loader.report(first, [float(row % 2) for row in rows_of(first)])
        loader.ack(first)
        out = loader.get_samples(4)
        loader.report(out[:2], [1.0, 1.0])
        assert rows_of(out + loader.get_samples(2)) == [0, 2, 4, 6, 8, 4]
        state = json.loads(json.dumps(loader.state_dict()))
    with make(source, **knobs) as loader:
        loader.load_state_dict(state)
        again = loader.get_samples(4)
        loader.report(again[2:], [1.0, 1.0])
        assert rows_of(again + loader.get_samples(4)) == [0, 2, 4, 6, 8, 4, 6, 8]


# Of a mixture, each part has a memory of its own


@pytest.fixture
def mix(tmp_path):
    """A function that makes a mixture of these parts, of which "math" is a mixture of its own."""
    code, math = (write_rows(tmp_path / f"{name}.jsonl", number) for name, number in (("code", 31), ("math", 20)))
    parts = {"code": code, "math": Mix({"easy": math}, quota=4)}
    return lambda *names: Mix({name: parts[name] for name in names}, quota=4, on_mix_change="apply")


def reported(loader, num_steps):
    """The state after so many batches with scores."""
    for _ in range(num_steps):
        loader.report(loader.get_next_batch(8), [0.5] * 8)
    return json.loads(json.dumps(loader.state_dict()))


def test_a_report_over_a_mixture_is_counted_whole_or_not_at_all(mix):
    with make(mix("code", "math"), outcomes=Outcomes(policy=SOLVED)) as loader:
        samples = loader.get_next_batch(8)
        foreign = samples[0].to_dict()
        for change in ({"source_name": "other"}, {"source_epoch": None}):
            with pytest.raises(errors.InvalidGroupError, match="AD482.*no part of this mixture"):
                loader.report([samples[1], Sample.from_dict(foreign | change)], [1.0, 1.0])
        assert loader.statistics().outcome_rows == 0
        loader.add_samples([[samples[0]]])
        state = json.loads(json.dumps(loader.state_dict()))
    with make(mix("code", "math"), outcomes=Outcomes(policy=SOLVED)) as loader:
        loader.load_state_dict(state)
        assert loader.report(loader.get_samples(1), [1.0]) == 1, "a group from a snapshot is known"


def test_a_part_that_comes_back_has_its_memory_again(mix):
    state = None
    for names, num_steps in ((("math", "code"), 3), (("code",), 1), (("math", "code"), 0)):
        with make(mix(*names), outcomes=Outcomes(policy=SOLVED)) as loader:
            if state:
                loader.load_state_dict(state)
            state = reported(loader, num_steps)
            parts = loader.statistics().by_source
            assert names == ("code",) or parts["math.easy"].outcome_rows == 12


def test_a_memory_in_a_file_is_refused_with_the_way_out_and_its_part_can_be_forgotten(mix):
    with make(mix("math", "code"), outcomes=Outcomes(policy=SOLVED)) as loader:
        state = reported(loader, 3)
    # As development builds wrote it
    state["mixture"]["parts"]["code"]["outcomes"] |= {"memory": None, "num_bytes": 1234}
    with make(mix("math", "code"), outcomes=Outcomes(policy=SOLVED)) as loader:
        with pytest.raises(errors.SnapshotMismatchError, match='AD606 .*in a file.*path=.*allow_changed={"outcomes"}'):
            loader.load_state_dict(state)
        num_rows = state["mixture"]["parts"]["code"]["outcomes"]["num_rows"]
        with capture_logs() as logs:
            loader.load_state_dict(state, allow_changed={"outcomes"})
        assert [entry["num_rows"] for entry in logs if entry["event"] == "outcomes.forgotten"] == [num_rows]
        parts = loader.statistics().by_source
        assert (parts["code"].outcome_rows, parts["math.easy"].outcome_rows > 0) == (0, True)
    with make(mix("math", "code")) as loader, pytest.raises(errors.SnapshotMismatchError, match=r"AD603"):
        loader.load_state_dict(state)


NUM_TOLD, SIZE = 12, 2
KEYS = ["accuracy", "format", "größe"]
BY_ACCURACY = PassRate(drop_above=0.5, key="accuracy")


@pytest.fixture
def few_rows(tmp_path):
    return write_rows(tmp_path / "few.jsonl", NUM_TOLD)


remembering_rewards = partial(remembering, policy=BY_ACCURACY)


values = st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0])
of_groups = st.dictionaries(
    st.sampled_from(KEYS), st.lists(values | st.lists(values, min_size=SIZE, max_size=SIZE), min_size=3, max_size=3)
)


@in_ci(max_examples=25)
@given(reports=st.lists(st.tuples(st.integers(0, NUM_TOLD - 3), of_groups.filter(bool), st.booleans()), max_size=5))
def test_each_reward_is_remembered_by_itself(reports):
    """Groups are reported, and the run is restarted now and then; the model is a dict of all scores of each reward."""
    scores = {key: {} for key in KEYS}
    with tempfile.TemporaryDirectory() as folder:
        rows = write_rows(Path(folder) / "rows.jsonl", NUM_TOLD)
        loader = remembering_rewards(rows)
        groups = loader.get_samples(NUM_TOLD)
        order = ids(group[0] for group in groups)
        loader.report(groups[:1], {"accuracy": [[0.25, None]]})  # so that the policy's reward is known
        scores["accuracy"][order[0], 0], num_skipped = 0.25, 1
        for first, given_scores, restarts in reports:
            num_new = 0
            for key, column in given_scores.items():
                for row, value in zip(order[first:], column, strict=False):
                    for attempt, score in enumerate(value if isinstance(value, list) else [value] * SIZE):
                        num_skipped += score is None
                        if score is not None and (row, attempt) not in scores[key]:
                            scores[key][row, attempt] = score
                            num_new += 1
            assert loader.report(groups[first : first + 3], given_scores) == num_new
            if restarts:
                state = json.loads(json.dumps(loader.state_dict()))
                loader.close()
                loader = remembering_rewards(rows)
                loader.load_state_dict(state)

        now, second = loader.statistics(), []
        accuracy = {row: [s for (of, _), s in scores["accuracy"].items() if of == row] for row in order}
        kept = [row for row in range(NUM_TOLD) if not accuracy[row] or sum(accuracy[row]) / len(accuracy[row]) < 0.5]
        if kept:
            second = ids(group[0] for group in loader.get_samples(len(kept)))
        loader.close()

    assert sorted(second) == kept
    assert now.outcome_skipped_total == num_skipped
    assert +Counter(now.outcome_rewards_total) == +Counter({key: len(found) for key, found in scores.items()})
    assert now.outcome_scores_total == sum(map(len, scores.values()))
    assert now.outcome_rows == max(len({row for row, _ in found}) for found in scores.values())


def test_rewards_of_samples_may_be_dicts_and_those_that_are_missing_are_skipped(few_rows):
    with remembering_rewards(few_rows) as loader:
        groups = loader.get_samples(NUM_TOLD)
        for place, (first, second) in enumerate(groups):
            first.reward = {"accuracy": float(place % 2), "format": 1.0}
            second.reward = {"accuracy": float(place % 2)} if place else None
        assert loader.report(groups) == 3 * NUM_TOLD - 1
        solved = {ids(group)[0] for group in groups[1::2]}
        assert set(ids(loader.get_next_batch(NUM_TOLD))) == set(range(NUM_TOLD)) - solved
        now = loader.statistics()
    assert now.outcome_rewards_total == {"accuracy": 2 * NUM_TOLD - 1, "format": NUM_TOLD}
    assert now.outcome_skipped_total == NUM_TOLD + 1


def hard_format(outcomes, epoch):
    return outcomes.last_mean > 0.5


hard_format.key = "format"


def test_a_policy_of_ones_own_says_which_reward_it_reads_and_a_later_policy_keeps_what_an_epoch_has_decided(few_rows):
    with remembering_rewards(few_rows, policy=f"{__name__}:hard_format") as loader:
        groups = loader.get_samples(NUM_TOLD)
        halves = [float(place < NUM_TOLD // 2) for place in range(NUM_TOLD)]
        loader.report(groups, {"format": halves, "accuracy": [1.0 - half for half in halves]})
        begun = ids(group[0] for group in loader.get_samples(2))
        state = loader.state_dict()
    with remembering_rewards(few_rows) as loader:  # accuracy counts from the next epoch on
        loader.load_state_dict(state)
        begun += ids(group[0] for group in loader.get_samples(NUM_TOLD // 2 - 2))
        following = ids(group[0] for group in loader.get_samples(NUM_TOLD // 2))

    first_half = sorted({ids(group)[0] for group in groups[: NUM_TOLD // 2]})
    assert sorted(begun) == sorted(set(range(NUM_TOLD)) - set(first_half))
    assert sorted(following) == first_half


def test_a_run_that_had_one_reward_continues_with_several(few_rows):
    with remembering_rewards(few_rows, policy=PassRate(drop_above=0.5)) as loader:
        loader.report(loader.get_samples(4), [1.0] * 4)
        state = loader.state_dict()
    del state["outcomes"]["by_key"], state["outcomes"]["num_skipped"]  # as in states of before
    with remembering_rewards(few_rows) as loader:
        loader.load_state_dict(state)
        loader.report(loader.get_samples(2), {"accuracy": [1.0, 0.0]})
        now = loader.statistics()
    assert (now.outcome_scores_total, now.outcome_rewards_total, now.outcome_rows) == (12, {"accuracy": 4}, 4)


def test_each_part_of_a_mixture_has_its_own(tmp_path):
    parts = {name: Part(write_rows(tmp_path / f"{name}.jsonl", 4), weight=1) for name in ("a", "b")}
    with remembering_rewards(Mix(parts)) as loader:
        groups = loader.get_samples(6)
        loader.report(groups, {"accuracy": [0.0] * 6, "format": [None, *[1.0] * 5]})
        now = loader.statistics()
    assert now.outcome_rewards_total == {"accuracy": 12, "format": 10}
    assert all(part.outcome_scores_total for part in now.by_source.values())
    assert sum(part.outcome_scores_total for part in now.by_source.values()) == 22
    assert sum(part.outcome_skipped_total for part in now.by_source.values()) == 2
    assert now.to_dict()["asyncdata_outcome_rewards_format_total"] == 10
    assert 'asyncdata_outcome_rewards_total{reward="format"} 10' in now.to_prometheus()


def test_a_recorded_run_has_the_totals_of_each_reward_of_each_start_and_its_page_has_their_means(few_rows, tmp_path):
    with remembering_rewards(few_rows, telemetry=tmp_path / "telemetry") as loader:
        groups = loader.get_samples(3)
        loader.report(groups[:1], {"accuracy": [0.5], "format": [[None, 1.0]]})
        loader.report(groups[1:], {"accuracy": [[0.0, 1.0], None], "format": [1.0, 0.5]})
    (file,) = (tmp_path / "telemetry").glob("*.jsonl")
    last = [record for line in file.read_text().splitlines() if (record := json.loads(line))["kind"] == "interval"][-1]
    assert last["rewards"] == {
        "accuracy": {"groups": 3, "scores": 4, "skipped": 2, "degenerate": 1, "total": 2.0},
        "format": {"groups": 3, "scores": 5, "skipped": 1, "degenerate": 2, "total": 4.0},
    }
    assert main(["report", str(file.parent), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "Reward accuracy" in page
    assert "mean of 5 scores, 1 skipped; 2 of 3 groups have equal scores" in page


@pytest.mark.parametrize(
    ("policy", "scores", "message"),
    [
        (BY_ACCURACY, {"acuracy": [1.0, 0.0]}, "AD484 .* the rewards 'acuracy', and .* key='accuracy'"),
        (BY_ACCURACY, [1.0, 0.0], "AD484 .* the rewards one without a key, and the policy"),
        (PassRate(drop_above=0.5), {"b": [1, 0], "a": [1, 0]}, "AD484 .* the rewards 'a', 'b', and .* without a key"),
        (None, {}, r"AD482 the keys of several rewards are names, got \[\]"),
        (None, {"": [1.0, 0.0]}, "AD482 the keys of several rewards are names"),
        (None, {"a": [1.0]}, "AD482 .* 2 samples or groups, and 1 scores"),
        (None, {"a": [1.0, [0.0]]}, "AD482 a group of 2 samples was reported with 1 scores"),
        (None, {"a": [1.0, 0.0], "b": [1.0, float("nan")]}, "AD482 the score of .* must be a finite number, got nan"),
    ],
)  # fmt: skip
def test_rewards_that_cannot_be_counted_are_refused_and_none_is_counted(few_rows, policy, scores, message):
    with remembering_rewards(few_rows, policy=policy) as loader:
        groups = loader.get_samples(2)
        with pytest.raises(errors.InvalidGroupError, match=message):
            loader.report(groups, scores)
        groups[0][0].reward, groups[1][0].reward = {"accuracy": 1.0}, 0.5
        with pytest.raises(errors.InvalidGroupError, match="AD482 .* has the reward 0.5, and others a dict"):
            loader.report(groups)
        assert loader.statistics().outcome_scores_total == 0
