"""Each framework's adapter, driven as its framework drives it: the loader's rows in its order, also after a kill."""

import base64
import importlib
import io
import json
import re
import sys
from contextlib import ExitStack, closing
from functools import partial
from itertools import islice

import pytest

from asyncdata import DataLoader, Mix, Part, RowFn, Shuffle
from asyncdata.errors import ConfigError, SnapshotError, SnapshotMismatchError

pytest.importorskip("torch", reason="torch is not installed")


from asyncdata.integrations import verl, verl_sft
from asyncdata.integrations.transformers import attach, row_with_pictures
from tests.support import adapters
from tests.support.adapters import KNOBS, NUM_ROWS, STEPS, numbers_of
from tests.support.frameworks import verl_sft as sft
from tests.support.ranks import settled
from tests.support.sources import jsonl

SHARING = [adapters.stateful_loader, adapters.dataset, adapters.torchtitan]
"""Each rank has its own part of the rows."""

NAMES = "order_view verl verl_sft xtuner_rl"
ADAPTERS = [*SHARING, *(getattr(adapters, name) for name in NAMES.split())]


@pytest.fixture
def path(jsonl_file):
    return jsonl_file(rows(range(NUM_ROWS)))


def rows(numbers):
    return [{"number": number, "messages": sft.row_of(number)["messages"], "prompt": "p"} for number in numbers]


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
        return settled(json.loads(state["asyncdata"]))

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
    with pytest.raises(ConfigError, match=f"{name} needs {package}"):
        getattr(adapter, name)


def test_attach_without_transformers_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.trainer_callback", None)
    with pytest.raises(ConfigError, match="attach needs transformers"):
        attach(None, None)


def _verl(**changes):
    verl.check({"shuffle": False, "dataloader_num_workers": 0, "validation_shuffle": False, **changes})


REFUSED = [
    (lambda: _verl(shuffle=True), "AD447 data.shuffle=True .* data.asyncdata.shuffle to the order"),
    (lambda: _verl(dataloader_num_workers=8), "AD447 data.dataloader_num_workers=8 .* data.asyncdata.num_workers to"),
    (lambda: verl.check({}), "AD447 data.validation_shuffle=True .* Set data.validation_shuffle=false"),
    (lambda: verl.are_validation("a", {"train_files": ["a"], "val_files": "a"}), "AD447 .* are the same, .'a'., so"),
    (lambda: verl.VerlRows(parquet_files=["a"]), "AD447 data.custom_cls names RLDataset, .*verl_sft.* to SFTDataset"),
    (lambda: verl_sft.VerlSFTRows(data_files=["a"]), "AD447 .* names SFTDataset, .* data_files: .* to RLDataset"),
    (lambda: verl_sft.check({"num_workers": 8}), r"AD447 data.num_workers=8 .* Set data.num_workers=0"),
    (lambda: verl_sft.check({"asyncdata": {"shuffle": True}}), r"AD447 data.asyncdata.shuffle=true .* to 'full'"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[re.sub(r"\W+", " ", told)[:50] for _, told in REFUSED])
def test_what_would_lose_rows_or_the_order_is_refused_with_the_way_out(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_settings_that_keep_the_order_are_taken():
    _verl()
    verl_sft.check({"num_workers": 0, "asyncdata": {"shuffle": "full"}})


def test_rows_for_trl_have_pictures_as_a_data_set_of_hugging_face_gives_them(path, tmp_path):
    pil = pytest.importorskip("PIL.Image")
    turned, kept = pil.new("RGB", (4, 2), (200, 0, 0)), pil.new("RGB", (3, 3))
    exif = pil.Exif()
    exif[0x0112] = 6  # a quarter turn
    data = io.BytesIO()
    turned.save(data, "png", exif=exif)
    kept.save(tmp_path / "kept.png")
    text = base64.b64encode(data.getvalue()).decode()
    both = [{"bytes": text, "path": None}, {"bytes": None, "path": str(tmp_path / "kept.png")}]
    row = {"prompt": "p", "images": both, "image": "a path"}
    path.write_bytes(jsonl([row, {**row, "images": both[:1], "image": None}]))
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
