"""A feeder of TransferQueue: nothing is lost and nothing comes twice, whichever of loader and queue was saved later."""

import copy
import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdata import DataLoader, RowFn
from asyncdata.errors import ConfigError
from asyncdata.integrations.transfer_queue import QueueFeeder
from tests.support.examples import in_ci
from tests.support.frameworks.stand_ins import stand_in_module
from tests.support.loading import write_rows

ROWS = 23
ROOM = 4
PARTITION = "train"
SETTINGS = {"epochs": 2, "seed": 5, "commit": "on_ack", "num_workers": 0}
VERL_TAG = {"is_prompt": True, "status": "pending", "global_steps": 0}


class Store:
    """What the feeder calls of the package ``transfer_queue``, in memory."""

    def __init__(self):
        self.partitions = {}

    def kv_batch_put(self, keys, partition_id, fields, tags):
        for place, (key, tag) in enumerate(zip(keys, tags, strict=True)):
            row = {name: column[place] for name, column in fields.items()}
            self.partitions.setdefault(partition_id, {})[key] = tag, row

    def kv_put(self, key, partition_id, tag):
        self.partitions.setdefault(partition_id, {})[key] = tag, {}

    def kv_list(self, partition_id=None):
        found = {partition_id: self.partitions.get(partition_id, {})} if partition_id else self.partitions
        return {name: {key: tag for key, (tag, _) in keys.items()} for name, keys in found.items() if keys}

    def kv_clear(self, keys, partition_id):
        for key in keys:
            self.partitions[partition_id].pop(key, None)

    def kv_batch_get(self, keys, partition_id, select_fields):
        rows = [self.partitions[partition_id][key][1] for key in keys]
        return {name: [row[name] for row in rows] for name in select_fields}

    def save(self):
        return copy.deepcopy(self.partitions)

    def load(self, saved):
        self.partitions = copy.deepcopy(saved or {})


@pytest.fixture(scope="module")
def store():
    store = Store()
    with pytest.MonkeyPatch.context() as patch:
        calls = {name: getattr(store, name) for name in ("kv_batch_put", "kv_put", "kv_list", "kv_clear")}
        stand_in_module(patch, "transfer_queue", **calls)
        stand_in_module(patch, "tensordict", TensorDict=lambda columns, batch_size: columns)
        kinds = {"NonTensorData": lambda value: value, "NonTensorStack": lambda *values: list(values)}
        stand_in_module(patch, "tensordict.tensorclass", **kinds)
        yield store


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.jsonl", ROWS)


def opened(path, **settings):
    return DataLoader(path, tokenize_fn=RowFn(), **SETTINGS | settings)


def row_of(sample):
    return {"row": sample.extra}


class Run:
    """A trainer with a queue, a loader, and what was trained when each of the two was saved."""

    def __init__(self, path, store):
        self.path, self.store, self.trained = path, store, []
        self.queue, self.at_queue = None, 0
        store.load(None)
        self.open()
        self.save_loader()

    def open(self):
        self.loader = opened(self.path)
        self.feeder = QueueFeeder(self.loader, ROOM, fields=row_of, tag=VERL_TAG)

    def prompts(self):
        return sorted(key for key in self.store.kv_list(PARTITION).get(PARTITION, {}) if "_" not in key)

    def fill(self, _=0):
        self.feeder.fill()
        assert len(self.prompts()) <= ROOM

    def roll_out(self, which):
        """Keys of rollouts stand beside the prompt's, which may go before them."""
        if prompts := self.prompts():
            key = prompts[which % len(prompts)]
            self.store.kv_put(key=f"{key}_0_0", partition_id=PARTITION, tag={"status": "success"})

    def train(self, which):
        if prompts := self.prompts():
            key = prompts[which % len(prompts)]
            row = list(self.store.kv_batch_get(keys=[key], partition_id=PARTITION, select_fields=["row"])["row"])[0]
            names = [name for name in self.store.kv_list(PARTITION)[PARTITION] if name.partition("_")[0] == key]
            self.store.kv_clear(keys=names, partition_id=PARTITION)
            self.trained.append((key.partition(":")[0], getattr(row, "data", row)["id"]))

    def save_loader(self, _=0):
        self.state, self.at_loader = json.loads(json.dumps(self.feeder.state_dict())), len(self.trained)

    def save_queue(self, _=0):
        self.queue, self.at_queue = self.store.save(), len(self.trained)

    def save_and_train(self, saves):
        """After each, three prompts are trained and others put."""
        for save in saves:
            getattr(self, save)()
            for which in (1, 0, 2):
                self.train(which)
                self.fill()

    def crash(self, _=0):
        """The weights are those of the later save."""
        self.loader.close()
        self.store.load(self.queue)
        del self.trained[max(self.at_loader, self.at_queue) :]
        self.open()
        self.feeder.load_state_dict(self.state)

    def finish(self):
        while self.feeder.fill() or self.prompts():
            self.train(0)
        self.loader.close()
        return sorted(self.trained)


ALL = sorted((str(epoch), row) for epoch in range(2) for row in range(ROWS))
STEPS = ("fill", "fill", "train", "train", "roll_out", "save_loader", "save_queue", "crash")


@in_ci(max_examples=40)
@given(steps=st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 3)), max_size=40))
def test_each_prompt_is_trained_once_whatever_was_saved_when(path, store, steps):
    run = Run(path, store)
    for name, which in steps:
        getattr(run, name)(which)
    assert run.finish() == ALL


@pytest.mark.parametrize("order", [("save_loader", "save_queue"), ("save_queue", "save_loader")])
def test_prompts_that_were_put_or_trained_between_the_two_saves_come_once(path, store, order):
    run = Run(path, store)
    run.fill()
    run.save_and_train(order)
    run.crash()
    assert len(run.trained) == 3
    assert run.finish() == ALL


def test_prompts_have_the_fields_and_tags_that_were_asked_for(path, store):
    store.load(None)
    with opened(path, shuffle=False) as loader:
        feeder = QueueFeeder(loader, 2, tag=VERL_TAG)
        assert feeder.fill() == ["0:0:0", "0:0:1"]
        assert feeder.fill() == []
        tag, fields = store.partitions[PARTITION]["0:0:1"]
        assert tag == VERL_TAG
        assert (fields["prompt_ids"], fields["extra"]["id"]) == ([], 1)


@pytest.mark.parametrize("given", [{"commit": "on_delivery"}, {"room": 0}])
def test_a_loader_without_leases_and_a_queue_without_room_are_refused(path, store, given):
    with opened(path, commit=given.get("commit", "on_ack")) as loader, pytest.raises(ConfigError, match="AD466 Queue"):
        QueueFeeder(loader, given.get("room", 1))


def test_without_the_package_it_is_named(path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transfer_queue", None)
    with opened(path) as loader, pytest.raises(ConfigError, match="TransferQueue"):
        QueueFeeder(loader, 1)


# The real package, on loopback


@pytest.fixture
def real(tmp_path):
    tq = pytest.importorskip("transfer_queue", reason="TransferQueue is not installed")
    ray = pytest.importorskip("ray", reason="TransferQueue needs ray")
    ray.init(num_cpus=8, include_dashboard=False, logging_level="ERROR")
    try:
        yield tq, tmp_path / "queue"
        tq.close()
    finally:
        ray.shutdown()


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_with_the_real_queue_each_prompt_is_trained_once_whatever_was_saved_later(path, real):
    tq, folder = real

    def load(saved):
        """The queue as it was saved; it is emptied where nothing was."""
        for name, keys in tq.kv_list().items():
            if keys:
                tq.kv_clear(keys=list(keys), partition_id=name)
        if saved:
            tq.load_checkpoint(folder)

    def save():
        tq.save_checkpoint(folder)
        return True

    tq.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
    calls = {name: getattr(tq, name) for name in ("kv_put", "kv_list", "kv_clear", "kv_batch_get")}
    store = SimpleNamespace(save=save, load=load, **calls)
    for order in (("save_loader", "save_queue"), ("save_queue", "save_loader"), ("save_loader",)):
        run = Run(path, store)
        run.fill()
        run.save_and_train(order)
        run.roll_out(1)
        run.crash()
        assert len(run.trained) == 3 * (len(order) - 1)
        assert run.finish() == ALL
