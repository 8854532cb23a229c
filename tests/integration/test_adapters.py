"""Each framework's adapter, driven as its framework drives it: the loader's rows in its order, through kill and resume.

Base classes of frameworks are stood in for. Their own code drives the adapters in ``tests/integration/frameworks``.
"""

import base64
import importlib
import io
import json
import re
import sys
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice
from types import SimpleNamespace

import pytest

from asyncdata import DataLoader, Mix, Part, RowFn, Shuffle
from asyncdata.errors import ConfigError, SnapshotError, SnapshotMismatchError

pytest.importorskip("torch", reason="torch is not installed")

from asyncdata.integrations import megatron, nemo_rl, openrlhf, prime_rl, skyrl, verl, verl_sft
from asyncdata.integrations.axolotl import LoaderPlugin
from asyncdata.integrations.transformers import row_with_pictures
from tests.support import adapters
from tests.support.adapters import KNOBS, NUM_ROWS, STEPS, numbers_of
from tests.support.frameworks.stand_ins import stand_in_module
from tests.support.ranks import settled

SHARING = [adapters.stateful_loader, adapters.dataset, adapters.trainer, adapters.megatron, adapters.torchtitan]
"""Each rank has its own part of the rows."""

NAMES = "order_view grouping_trainer axolotl nemo_rl openrlhf prime_rl skyrl skyrl_async verl verl_sft"
ADAPTERS = [*SHARING, *(getattr(adapters, name) for name in NAMES.split())]


@pytest.fixture(autouse=True)
def _frameworks(monkeypatch):
    adapters.stand_in_for_frameworks(monkeypatch)


@pytest.fixture
def path(jsonl_file):
    return jsonl_file(rows(range(NUM_ROWS)))


def rows(numbers):
    return [{"number": number, "messages": [], "prompt": "p"} for number in numbers]


def assert_resumes(source, opened, **knobs):
    with DataLoader(source, tokenize_fn=RowFn(), **KNOBS | knobs) as loader:
        order = numbers_of(loader.get_next_batch(4 * STEPS))
    with closing(opened(source, **knobs)) as adapter:
        whole = list(islice(adapter.steps(), STEPS))
    found = [number for step in whole for number in step]

    assert found == order[: len(found)]
    assert len(found) > NUM_ROWS, "the end of an epoch is passed"

    for saved_at in (1, 3, NUM_ROWS // len(whole[0])):
        with closing(opened(source, **knobs)) as killed:
            steps = killed.steps()
            before = list(islice(steps, saved_at))
            state = killed.state()
            next(steps)
        with closing(opened(source, **knobs)) as resumed:
            resumed.load(state)
            assert before + list(islice(resumed.steps(), STEPS - saved_at)) == whole, f"saved after step {saved_at}"


@pytest.mark.parametrize("opened", ADAPTERS)
def test_the_rows_are_the_loaders_through_kill_and_resume(path, opened):
    assert_resumes(path, opened)


@pytest.mark.parametrize("opened", [adapters.stateful_loader, adapters.dataset, adapters.order_view])
def test_the_samples_are_those_of_a_mixture_too(jsonl_file, opened):
    parts = {"a": Part(jsonl_file(rows(range(12)), "a.jsonl"), weight=3)}
    parts["b"] = Part(jsonl_file(rows(range(100, 108)), "b.jsonl"), weight=2)
    opens = partial(opened, rows_per_epoch=NUM_ROWS) if opened is adapters.order_view else opened
    assert_resumes(Mix(parts, quota=5), opens, shuffle=Shuffle(block_bytes=256, window_blocks=4))


@pytest.mark.parametrize("opened", SHARING)
def test_ranks_share_the_rows_and_a_state_of_any_of_them_continues_on_another_number(path, opened):
    def taken(each, num_rows):
        found, steps = [], each.steps()
        while len(found) < num_rows:
            found += next(steps)
        return found

    with ExitStack() as stack:
        alone, other, *two = (
            stack.enter_context(closing(opened(path, **place)))
            for place in ({}, {}, {"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2})
        )
        whole = [taken(alone, 8), taken(alone, 8), taken(alone, 4)]
        parts = [taken(rank, 4) for rank in two]
        states = [rank.state() for rank in two]
        more = [taken(rank, 4) for rank in two]
        other.load(states[1])
        following = taken(other, 8)

    def text_of(state):
        """The loader's state in that of the framework, without what it knows only once its workers have read so far."""
        own = state["attributes"]["saved"] if "attributes" in state else state
        return settled(json.loads(own["asyncdata"]))

    assert sorted(parts[0] + parts[1]) == sorted(whole[0])
    assert sorted(more[0] + more[1]) == sorted(whole[1])
    assert following == whole[1]
    assert text_of(states[0]) == text_of(states[1])


@pytest.mark.parametrize("opened", ADAPTERS)
def test_a_state_of_another_order_is_refused(path, opened):
    with closing(opened(path, seed=4)) as other:
        next(other.steps())
        state = other.state()
    message = "AD603 .*\\n  seed: saved 4, present 3"
    with closing(opened(path)) as adapter, pytest.raises(SnapshotMismatchError, match=message):
        adapter.load(state)


@pytest.mark.parametrize("opened", ADAPTERS)
def test_the_state_of_the_frameworks_own_loader_is_refused(path, opened):
    with closing(opened(path)) as adapter, pytest.raises(SnapshotError, match="AD602"):
        adapter.load({"_iterator_finished": False})


@pytest.mark.parametrize(
    ("module", "name", "package"),
    [
        ("axolotl", "AsyncDataPlugin", "axolotl"),
        ("axolotl", "AsyncDataArgs", "pydantic"),
        ("nemo_rl", "RowDataset", "nemo_rl"),
        ("prime_rl", "RowsConfig", "verifiers"),
        *(("skyrl", name, "skyrl") for name in ("PPOExp", "PPOTrainer", "FullyAsyncPPOTrainer")),
        ("torchtitan", "AsyncDataLoader", "torchtitan"),
        ("verl", "RLDataset", "verl"),
        ("verl_sft", "SFTDataset", "verl"),
    ],
)
def test_a_class_whose_framework_is_missing_names_it(monkeypatch, module, name, package):
    adapter = importlib.import_module(f"asyncdata.integrations.{module}")
    adapters.made_late(monkeypatch, adapter, name)
    for imported in [package, *(found for found in sys.modules if found.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, imported, None)
    needed = module.removesuffix("_sft").replace("_", "-") if package != "verifiers" else package
    with pytest.raises(ConfigError, match=f"{name} needs {needed}"):
        getattr(adapter, name)


@pytest.mark.parametrize(
    ("call", "what", "packages"),
    [
        (openrlhf.plug_in, "plug_in needs openrlhf", ["openrlhf"]),
        (skyrl.main, "asyncdata.integrations.skyrl needs skyrl", ["skyrl", "ray"]),
        (lambda: adapters.attach(None, None), "attach needs transformers", ["transformers.trainer_callback"]),
    ],
    ids=["OpenRLHF", "SkyRL", "transformers"],
)
def test_a_call_whose_framework_is_missing_names_it(monkeypatch, call, what, packages):
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=what):
        call()


class Config(SimpleNamespace):
    """A configuration as axolotl has it."""

    def get(self, name):
        return getattr(self, name, None)


def _axolotl(**changes):
    LoaderPlugin().check(Config(**{"asyncdata_loader": "my_data.make_loader", "max_steps": 9, **changes}))


def _openrlhf(*, generated=4, probs=None):
    rollout = SimpleNamespace(batch_size=4, vllm_generate_batch_size=generated)
    args = SimpleNamespace(rollout=rollout, data=SimpleNamespace(prompt_probs=probs, prompt_dataset="rows.jsonl"))
    openrlhf.prepare_datasets(SimpleNamespace(args=args), None, source=None, settings={})


def _skyrl(*names, **changes):
    adapters.skyrl_experiment(adapters.skyrl_settings(["rows.jsonl", *names], **changes), drop_overlong=True)


def _verl(**changes):
    verl.check({"shuffle": False, "dataloader_num_workers": 0, "validation_shuffle": False, **changes})


def _prime_rl(path, **settings):
    prime_rl.check(path, {"num_workers": 2, **settings})


NOT_FOLLOWED = {"n_samples_per_prompt": 2, "epochs": 2, "commit": 2, "tokenize_fn": 2, "packing": 2}

REFUSED = [
    (lambda: _axolotl(asyncdata_loader=None), "AD462 the configuration has no asyncdata_loader"),
    (lambda: _axolotl(asyncdata_loader="no_module"), "AD462 the configuration has no asyncdata_loader"),
    (lambda: _axolotl(max_steps=None), "AD462 the configuration has no max_steps, and a loader has no length. For n"),
    (lambda: _axolotl(sample_packing=True), "AD462 sample_packing is not followed, leave it out: the loader packs"),
    (lambda: _axolotl(val_set_size=0.1), "AD462 val_set_size is not followed, leave it out: the plugin makes no"),
    (lambda: _axolotl(test_datasets=["a"]), "AD462 test_datasets is not followed, leave it out: the plugin makes no"),
    (lambda: _axolotl(streaming=True), "AD462 streaming is not followed, leave it out: the loader reads as it goes"),
    (lambda: nemo_rl.with_state(SimpleNamespace(dataset=[1])), r"with_state\(\) was given list, which has no loader's"),
    (lambda: nemo_rl.with_state({"math": []}), r"with_state\(\) was given list, .* data.train needs one entry"),
    (lambda: _openrlhf(generated=8), r"AD460 .*vllm_generate_batch_size is 8 and --rollout.batch_size 4: .* Leave the"),
    (lambda: _openrlhf(probs="0.7,0.3"), "AD460 --data.prompt_probs is not followed: .* pass a mixture of sources to"),
    (lambda: _prime_rl(""), "AD464 env.taskset.data_path is not set: a file, a glob"),
    *(
        (
            lambda name=name: _prime_rl("a", **{name: 2}),
            rf"AD464 env.taskset.asyncdata.{name}=2 is not followed. Leave it out",
        )
        for name in NOT_FOLLOWED
    ),
    (lambda: _skyrl(simulated=True), r"AD463 trainer.fully_async.simulate_training=true .*: leave it out"),
    (lambda: _skyrl(has_images=True), r"AD463 generator.vision_language_generator=true.* set asyncdata.drop_overlong"),
    (lambda: _skyrl("openai/gsm8k"), "AD463 data.train_data=.* has a data set of Hugging Face beside others"),
    (lambda: _verl(shuffle=True), "AD447 data.shuffle=True .* data.asyncdata.shuffle to the order"),
    (lambda: _verl(dataloader_num_workers=8), "AD447 data.dataloader_num_workers=8 .* data.asyncdata.num_workers to"),
    (lambda: verl.check({}), "AD447 data.validation_shuffle=True .* Set data.validation_shuffle=false"),
    (lambda: verl.are_validation("a", {"train_files": ["a"], "val_files": "a"}), "AD447 .* are the same, .'a'., so"),
    (lambda: verl.VerlRows(parquet_files=["a"]), "AD447 data.custom_cls names RLDataset, .*verl_sft.* to SFTDataset"),
    (lambda: verl_sft.VerlSFTRows(data_files=["a"]), "AD447 .* names SFTDataset, .* data_files: .* to RLDataset"),
    (lambda: verl_sft.check({"num_workers": 8}), r"AD447 data.num_workers=8 .* Set data.num_workers=0"),
    (lambda: verl_sft.check({"asyncdata": {"shuffle": True}}), r"AD447 data.asyncdata.shuffle=true .* to 'full'"),
]


@pytest.mark.parametrize(
    ("call", "message"), REFUSED, ids=[re.sub(r"\W+", " ", message)[:50].strip() for _, message in REFUSED]
)
def test_what_would_lose_rows_or_the_order_is_refused_with_the_way_out(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_settings_that_keep_the_order_are_taken():
    _axolotl()
    _verl()
    _prime_rl("rows.jsonl")
    verl_sft.check({"num_workers": 0, "asyncdata": {"shuffle": "full"}})


def test_an_iterator_for_megatron_refuses_a_loader_of_other_ranks(path):
    def groups(rank, size):
        return SimpleNamespace(dp=SimpleNamespace(rank=lambda: rank, size=lambda: size))

    ranks = megatron.ranks_of(groups(5, 8))
    with (
        DataLoader(path, tokenize_fn=RowFn(), batch_size=2, ranks=ranks, **KNOBS) as loader,
        pytest.raises(ConfigError, match="AD461 the loader is rank 5 of 8, and this process data-parallel rank 1 of 4"),
    ):
        megatron.MegatronIterator(loader, groups(1, 4))


def test_the_end_of_the_data_ends_an_iteration_of_megatron(path):
    with closing(adapters.megatron(path, epochs=1)) as opened:
        assert sorted(number for step in opened.steps() for number in step) == list(range(NUM_ROWS))


# Rows as a framework takes them


def test_a_row_for_nemo_rl_has_messages_and_the_name_of_its_task(jsonl_file):
    path = jsonl_file([{"question": "1 + 1?", "answer": "2"}, {"messages": ["m"], "more": 3}], "math/train.v1.jsonl")
    keys = {"input_key": "question", "output_key": "answer", "asyncdata": KNOBS | {"shuffle": False}}
    given, named = nemo_rl.NemoRows(str(path), **keys), nemo_rl.NemoRows([str(path)], task_name="sums", **keys)
    with closing(given.dataset), closing(named.dataset):
        messages = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
        assert [given.dataset[index] for index in range(2)] == [
            {"messages": messages, "task_name": "math-train"},
            {"messages": ["m"], "more": 3, "task_name": "math-train"},
        ]
        assert (given.task_name, named.dataset[0]["task_name"]) == ("math-train", "sums")


def test_openrlhfs_trainers_find_our_function_with_the_settings_of_plug_in(path, monkeypatch):
    for name in ("ppo_trainer", "ppo_trainer_async"):
        stand_in_module(monkeypatch, f"openrlhf.trainer.{name}")
    openrlhf.plug_in(str(path), rows_per_epoch=8, seed=3)
    made = [sys.modules[f"openrlhf.trainer.{name}"].prepare_datasets for name in ("ppo_trainer", "ppo_trainer_async")]
    assert [(each.func, each.keywords) for each in made] == [
        (openrlhf.prepare_datasets, {"source": str(path), "settings": {"rows_per_epoch": 8, "seed": 3}})
    ] * 2


def test_rows_for_trl_have_pictures_as_a_data_set_of_hugging_face_gives_them(path, tmp_path):
    pil = pytest.importorskip("PIL.Image")
    turned, kept = pil.new("RGB", (4, 2), (200, 0, 0)), pil.new("RGB", (3, 3))
    exif = pil.Exif()
    exif[0x0112] = 6  # a quarter turn
    data = io.BytesIO()
    turned.save(data, "png", exif=exif)
    kept.save(tmp_path / "kept.png")
    both = [
        {"bytes": base64.b64encode(data.getvalue()).decode(), "path": None},
        {"bytes": None, "path": str(tmp_path / "kept.png")},
    ]
    row = {"prompt": "p", "images": both, "image": "a path"}
    path.write_text("".join(json.dumps(each) + "\n" for each in (row, {**row, "images": both[:1], "image": None})))
    with DataLoader(path, tokenize_fn=RowFn(), num_workers=0, shuffle=False) as loader:
        first, second = map(row_with_pictures, loader.get_next_batch(2))

    assert [picture.size for picture in first["images"]] == [(2, 4), (3, 3)]
    assert (first["image"], second["image"], second["images"][0].size) == ("a path", None, (2, 4))


def test_a_picture_that_cannot_be_opened_names_its_row(path):
    pytest.importorskip("PIL")
    path.write_text(json.dumps({"prompt": "p", "image": {"bytes": "AAAA", "path": None}}) + "\n")
    with DataLoader(path, tokenize_fn=RowFn(), num_workers=0) as loader, pytest.raises(OSError) as caught:
        row_with_pictures(loader.get_next_batch(1)[0])
    assert path.name in caught.value.__notes__[0]
