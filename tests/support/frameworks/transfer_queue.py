"""A trainer with a queue of TransferQueue, and the calls of that package in memory."""

import copy
import json

from asyncdata import DataLoader, RowFn
from asyncdata.integrations.transfer_queue import QueueFeeder

ROWS = 23
ROOM = 4
PARTITION = "train"
SETTINGS = {"epochs": 2, "seed": 5, "commit": "on_ack", "num_workers": 0}
VERL_TAG = {"is_prompt": True, "status": "pending", "global_steps": 0}
ALL = sorted((str(epoch), row) for epoch in range(2) for row in range(ROWS))


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


def opened(path, **settings):
    return DataLoader(path, tokenize_fn=RowFn(), **SETTINGS | settings)


def row_of(sample):
    return {"row": sample.extra}


class Run:
    """A trainer with a queue, a loader, and what was trained when each of the two was saved."""

    def __init__(self, path, store, room=ROOM, **settings):
        self.path, self.store, self.trained = path, store, []
        self.room, self.settings = room, settings
        self.queue, self.at_queue = None, 0
        store.load(None)
        self.open()
        self.save_loader()

    def open(self):
        self.loader = opened(self.path, **self.settings)
        self.feeder = QueueFeeder(self.loader, self.room, fields=row_of, tag=VERL_TAG)

    def prompts(self):
        return sorted(key for key in self.store.kv_list(PARTITION).get(PARTITION, {}) if "_" not in key)

    def fill(self, _=0):
        self.feeder.fill()
        assert len(self.prompts()) <= self.room

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
