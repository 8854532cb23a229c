"""``attach``, without a model: what a trainer of transformers or TRL gets, its epochs and its checkpoints."""

import shutil
from contextlib import closing
from itertools import islice
from types import SimpleNamespace

import pytest
import structlog

from asyncdata import DataLoader, PreferenceCollator, PreferenceTokenizeFn, RowFn, RowShuffle, SoftPacking
from asyncdata.errors import ConfigError, SnapshotError

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")

from asyncdata.integrations.torch import StatefulDataLoader
from asyncdata.integrations.transformers import attach, placeholder
from tests.support.adapters import numbers_of, trainer_of

ROWS = 40
KNOBS = {"tokenize_fn": RowFn(), "num_workers": 0, "timeout_s": 240}


@pytest.fixture
def rows(jsonl_file):
    return jsonl_file([{"prompt": "p", "number": number} for number in range(ROWS)])


@pytest.fixture
def loader(rows):
    with DataLoader(rows, batch_size=3, **KNOBS) as loader:
        yield loader


def attached(loader, given=None, **settings):
    """A trainer that has the loader."""
    trainer = trainer_of(**settings)
    attach(trainer, loader, **given or {})
    return trainer


def test_the_trainer_skips_no_batches_and_asks_the_loader(loader):
    trainer = attached(loader)
    assert trainer.args.ignore_data_skip
    assert not hasattr(trainer.get_train_dataloader(), "__len__")


@pytest.mark.parametrize(
    "name", ["train", "log", "get_train_dataloader", "get_eval_dataloader", "callback_handler", "_step"]
)
def test_a_version_without_a_name_that_is_touched_is_refused(rows, name):
    trainer = trainer_of(num_generations=2)

    class Renamed(type(trainer)):
        def __getattribute__(self, asked):
            if asked == name:
                raise AttributeError(asked)
            return super().__getattribute__(asked)

    trainer.__class__ = Renamed
    with DataLoader(rows, **KNOBS) as loader, pytest.raises(ConfigError, match=f"AD644 .*Renamed of .* no '{name}': "):
        attach(trainer, loader)


def test_a_checkpoint_that_was_saved_without_asking_for_the_state_is_an_error(loader):
    trainer = attached(loader)
    kept, state = trainer.callback_handler.callbacks[-1], SimpleNamespace(stateful_callbacks={}, global_step=0)
    kept.on_train_begin(trainer.args, state, None)
    trainer.args.should_save = True
    kept.state()
    kept.on_save(trainer.args, state, None)
    with pytest.raises(ConfigError, match="AD644 this version of transformers has saved step 0 without the loader's"):
        kept.on_save(trainer.args, state, None)
    trainer.args.should_save = False  # as on the other ranks
    kept.on_save(trainer.args, state, None)


def test_prompts_of_one_epoch_come_to_an_end(rows):
    with DataLoader(rows, epochs=1, **KNOBS) as loader:
        batches = list(attached(loader, num_generations=2).get_train_dataloader())
    assert sorted(number for batch in batches for number in numbers_of(batch)[::2]) == list(range(ROWS))


def test_prompts_at_the_end_that_fill_no_generation_batch_are_named(rows):
    with DataLoader(rows, epochs=1, **KNOBS) as loader, structlog.testing.capture_logs() as logs:
        groups = {"num_generations": 2, "generation_batch_size": 24}
        batches = list(attached(loader, **groups).get_train_dataloader())
    assert len(batches) == ROWS // 12
    assert logs == [{"event": "prompts.left_out", "log_level": "warning", "number": 4, "generation_batch": 12}]


@pytest.mark.thorough
def test_the_batches_of_pairs_are_those_of_trls_own_collator(jsonl_file, small_tokenizer):
    trl = pytest.importorskip("trl.trainer.dpo_trainer", reason="trl is not installed")
    pairs = [{"prompt": "1 + " * n, "chosen": " is " * (n % 3 + 1), "rejected": "?" * n} for n in range(1, 9)]
    knobs = KNOBS | {"tokenize_fn": PreferenceTokenizeFn(str(small_tokenizer))}
    with DataLoader(jsonl_file(pairs), **knobs) as loader:
        samples = loader.get_next_batch(5)
    found = PreferenceCollator(pad_id=7)(samples)

    examples = []
    for sample in samples:
        start = int((sample.labels == -100).sum())
        rejected, ((first, last),) = sample.extra["rejected_input_ids"], sample.extra["rejected_spans"]
        prompt, chosen = sample.tokens[:start].tolist(), sample.tokens[start:].tolist()
        assert (rejected[:first], last) == (prompt, len(rejected)), "the prompt, and a trained answer up to the end"
        examples.append({"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected[first:]})
    expected = trl.DataCollatorForPreference(pad_token_id=7)(examples)

    assert found.keys() == expected.keys()
    assert all(found[name].tolist() == expected[name].tolist() for name in expected)


@pytest.fixture
def folder(tmp_path):
    """Checkpoints of the steps 2, 4, 10 and 12; the last two were not saved whole."""
    for step, state in ((2, "{}"), (4, "{}"), (10, '{"global_'), (12, None)):
        path = tmp_path / "out" / f"checkpoint-{step}"
        path.mkdir(parents=True)
        if state is not None:
            (path / "trainer_state.json").write_text(state)
    return tmp_path / "out"


@pytest.mark.parametrize(
    ("given", "taken", "left_out"),
    [
        (True, "checkpoint-4", [12, 10]),
        ("checkpoint-12", "checkpoint-4", [12, 10]),
        ("checkpoint-10", "checkpoint-4", [10]),
        ("checkpoint-2", "checkpoint-2", []),
        ("another name", "another name", []),
        (None, None, []),
        (False, False, []),
    ],
)
def test_a_checkpoint_that_was_not_saved_whole_is_left_out_by_name(loader, folder, given, taken, left_out):
    trainer = attached(loader, output_dir=str(folder), max_steps=10)
    with structlog.testing.capture_logs() as logs:
        trainer.train(resume_from_checkpoint=str(folder / given) if isinstance(given, str) else given)
    assert trainer.trained == [(str(folder / taken) if isinstance(taken, str) else taken, 10)]
    assert [entry["path"] for entry in logs] == [str(folder / f"checkpoint-{step}") for step in left_out]


def test_no_whole_checkpoint_at_all_is_an_error_that_names_the_newest(loader, folder):
    for step in (2, 4):
        shutil.rmtree(folder / f"checkpoint-{step}")
    with pytest.raises(SnapshotError, match=r"AD641 .*checkpoint-12 was not saved whole"):
        attached(loader, output_dir=str(folder)).train(True)


def test_a_checkpoint_without_a_state_is_refused_unless_it_is_allowed(loader):
    state = SimpleNamespace(stateful_callbacks={}, global_step=4)
    with pytest.raises(SnapshotError, match="the checkpoint of step 4 has no state of a loader"):
        attached(loader).callback_handler.callbacks[0].on_train_begin(None, state, None)
    trainer = attached(loader, {"starts_new": True})
    trainer.callback_handler.callbacks[0].on_train_begin(trainer.args, state, None)
    assert list(state.stateful_callbacks) == ["AsyncDataState"]


@pytest.mark.parametrize("groups", [{}, {"num_generations": 2}])
def test_a_training_that_is_over_has_no_batch_when_it_is_started_again(rows, groups):
    with DataLoader(rows, **({} if groups else {"batch_size": 4}), **KNOBS) as loader:
        trainer = attached(loader, max_steps=10, **groups)
        kept = trainer.callback_handler.callbacks[-1]
        for step, num_batches in ((9, 1), (10, 0)):
            state = SimpleNamespace(stateful_callbacks={"AsyncDataState": kept.state()}, global_step=step)
            kept.on_train_begin(trainer.args, state, None)
            assert len(list(islice(trainer.get_train_dataloader(), 1))) == num_batches


@pytest.mark.parametrize(
    ("knobs", "given", "num_steps"),
    [
        ({}, 14, 42),
        ({}, "count", 42),
        ({"shuffle": RowShuffle(only_kept=True)}, None, 42),
        ({"shuffle": RowShuffle(only_kept=True), "drop_last": True}, None, 39),
    ],
    ids=["given", "counted", "known", "known, drop_last"],
)
def test_epochs_are_steps(rows, tmp_path, knobs, given, num_steps):
    """40 rows in batches of 3, and three epochs."""
    with DataLoader(rows, batch_size=3, cache={"folder": str(tmp_path / "cache")}, **KNOBS, **knobs) as loader:
        trainer = attached(loader, {"batches_per_epoch": given}, max_steps=-1)
        trainer.train()
        assert loader.position().epoch == 0, "the count has moved nothing"
    assert trainer.trained == [(None, num_steps)]


def test_epochs_of_prompts_are_their_generation_batches_with_all_repeats(rows):
    """40 prompts, 3 a generation batch, each used twice; two batches a step."""
    groups = {"num_generations": 2, "generation_batch_size": 6, "steps_per_generation": 2}
    with DataLoader(rows, shuffle="full", **KNOBS) as loader:
        trainer = attached(loader, max_steps=-1, gradient_accumulation_steps=2, **groups)
        trainer.train()
    assert trainer.trained == [(None, 3 * 14 * 2 // 2)]


def test_max_steps_goes_before_epochs_which_are_counted_all_the_same(loader):
    strategies = {"logging_strategy": "epoch", "eval_strategy": "no", "save_strategy": "no"}
    trainer = attached(loader, {"batches_per_epoch": 4}, max_steps=10, **strategies)
    trainer.train()
    control = SimpleNamespace(should_log=False, should_evaluate=False, should_save=False)
    seen = []
    for step in range(1, 9):
        control.should_log = False
        state = SimpleNamespace(global_step=step, max_steps=10, epoch=None)
        trainer.callback_handler.callbacks[-1].on_step_end(trainer.args, state, control)
        seen.append((state.epoch, control.should_log))

    assert trainer.trained == [(None, 10)]
    assert seen == [(step / 4, step in (4, 8)) for step in range(1, 9)]
    assert not (control.should_evaluate or control.should_save)


@pytest.mark.parametrize(("shuffle", "groups"), [(True, {}), ("full", {}), (True, {"num_generations": 2})])
def test_with_max_steps_the_epoch_of_the_log_is_that_of_the_data_also_after_a_resume(rows, shuffle, groups):
    """40 rows: of samples in batches of 4, or of prompts, 2 a generation batch."""
    size = {} if groups else {"batch_size": 4}
    share, state, seen = (1 / 20 if groups else 1 / 10), SimpleNamespace(stateful_callbacks={}, global_step=0), []
    for _ in range(3):
        with DataLoader(rows, shuffle=shuffle, **size, **KNOBS) as loader:
            trainer = attached(loader, **groups)
            kept = trainer.callback_handler.callbacks[-1]
            kept.on_train_begin(trainer.args, state, None)
            for _, _ in zip(range(7), trainer.get_train_dataloader(), strict=False):
                kept.on_step_end(trainer.args, state, None)
                seen.append(state.epoch)
            state.stateful_callbacks = {"AsyncDataState": kept.state()}
    assert seen == pytest.approx([share * step for step in range(1, 22)])


@pytest.mark.parametrize(
    ("settings", "given", "message"),
    [
        ({"max_steps": -1}, {}, r"AD643 .* no max_steps.* pass max_steps=; .* 'count'.* RowShuffle"),
        *(
            ({"max_steps": -1}, {"batches_per_epoch": given}, "AD643 batches_per_epoch is a whole number from 1 on, or")
            for given in (0, True, "counted", 2.5)
        ),
        ({"world_size": 2}, {}, "the loader is rank 0 of 1, and the trainer rank 0 of 2: pass ranks="),
        (
            {"world_size": 8, "process_index": 5, "tp": 2, "cp": 2},
            {},
            r"the trainer rank 1 of 2: .*Ranks\(rank=1, world",
        ),
        ({"world_size": 4, "sp": 2}, {}, r"sequence parallelism \(sp_size=2\)"),
        ({"world_size": 4, "tp": 2, "num_generations": 2}, {}, "leave out its tp_size and cp_size"),
        ({"process_index": 1}, {}, "the loader is rank 0 of 1, and the trainer rank 1 of 1: pass ranks="),
        ({"precompute_ref_log_probs": True}, {}, "precompute_ref_log_probs computes .*: leave it out"),
    ],
)
def test_arguments_that_cannot_work_are_refused(loader, settings, given, message):
    with pytest.raises(ConfigError, match=message):
        attached(loader, given, **settings)


def test_packs_under_context_parallelism_are_refused(rows):
    with DataLoader(rows, packing=SoftPacking(max_length=8), batch_size=1, num_workers=0, tokenize_fn=len) as packed:
        with pytest.raises(ConfigError, match="context parallelism, which keeps no boundaries .* Leave out packing="):
            attached(packed, world_size=2, cp=2)


def test_an_epoch_without_a_batch_is_refused(jsonl_file):
    shuffle = RowShuffle(only_kept=True)
    with closing(DataLoader(jsonl_file([{}]), batch_size=3, shuffle=shuffle, drop_last=True, **KNOBS)) as loader:
        trainer = attached(loader, max_steps=-1)
        with pytest.raises(ConfigError, match="AD643 an epoch of this loader has no batch"):
            trainer.train()


@pytest.mark.parametrize("knobs", [{"n_samples_per_prompt": 2}, {"ranks": {"rank": 0, "world_size": 2}}, None])
def test_a_grouping_trainer_wants_a_loader_of_single_rows(rows, knobs):
    with closing(DataLoader(rows, **KNOBS, **knobs or {})) as loader:
        given = StatefulDataLoader(loader) if knobs is None else loader
        with pytest.raises(ConfigError, match="repeats prompts and shares them out itself"):
            attached(given, num_generations=2)


@pytest.mark.parametrize(
    ("eval_dataset", "is_same", "message"),
    [
        ("placeholder", None, "AD642 the trainer's eval_dataset is a placeholder: pass eval_loader="),
        ("placeholder", True, "AD642 eval_loader is the loader of the training"),
        ({"a": None}, False, "AD642 eval_loader= is one set of batches"),
        ({"a": "placeholder"}, None, r"AD642 the trainer's eval_dataset\['a'\] is a placeholder"),
        ("rows of the user", False, "AD642 the trainer's eval_dataset would not be evaluated, as eval_loader= takes"),
        ("rows of the user", "b", "AD642 the trainer's eval_dataset would not be evaluated"),
        ({"a": "rows", "b": "rows"}, "b", r"AD642 the trainer's eval_dataset\['b'\] would not be evaluated"),
    ],
)
def test_an_evaluation_that_cannot_work_is_refused(loader, eval_dataset, is_same, message):
    trainer = trainer_of()
    trainer.eval_dataset = placeholder() if eval_dataset == "placeholder" else eval_dataset
    if eval_dataset == {"a": "placeholder"}:
        trainer.eval_dataset = {"a": placeholder()}
    other = SimpleNamespace(config=loader.config)
    with pytest.raises(ConfigError, match=message):
        attach(trainer, loader, eval_loader={None: None, True: loader, False: other, "b": {"b": other}}[is_same])


def test_several_sets_are_evaluated_by_name_beside_the_trainers_own(loader, jsonl_file):
    trainer, own = trainer_of(), object()
    trainer.eval_dataset = {"a": placeholder(), "own": own}
    paths = {name: jsonl_file([{"name": name, "number": n} for n in range(4)], name) for name in ("a", "b")}
    with DataLoader(paths["a"], batch_size=2, **KNOBS) as a, DataLoader(paths["b"], batch_size=4, **KNOBS) as b:
        attach(trainer, loader, eval_loader={"a": a, "b": b})
        attach(trainer, loader, eval_loader={"b": b, "a": a})  # again, as in a notebook
        found = {name: [list(trainer.get_eval_dataloader(name)) for _ in range(2)] for name in ("a", "b")}
    assert list(trainer.eval_dataset) == ["a", "own", "b"]
    assert {name: len(first) for name, (first, _) in found.items()} == {"a": 2, "b": 1}
    for name, loops in found.items():
        first, again = ([[row.extra["number"] for row in batch] for batch in loop] for loop in loops)
        assert first == again
        assert {row.extra["name"] for batch in loops[0] for row in batch} == {name}
    assert trainer.get_eval_dataloader("own") == "own", "the trainer looks it up"
    assert trainer.get_eval_dataloader(own) is own
