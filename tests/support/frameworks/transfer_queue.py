"""A trainer with a queue of TransferQueue, on a Ray cluster of its own."""

import contextlib
import json

from asyncdata import DataLoader, RowFn
from asyncdata.integrations.transfer_queue import QueueFeeder
from tests.support.ray_cluster import two_nodes

ROWS = 23
ROOM = 4
PARTITION = "train"
SETTINGS = {"epochs": 2, "seed": 5, "commit": "on_ack", "num_workers": 0}
VERL_TAG = {"is_prompt": True, "status": "pending", "global_steps": 0}
ALL = sorted((str(epoch), row) for epoch in range(2) for row in range(ROWS))


@contextlib.contextmanager
def queue_of(folder):
    """The package, with a queue that :class:`Run` saves in this folder."""
    import transfer_queue

    with two_nodes():
        transfer_queue.init({"backend": {"SimpleStorage": {"num_data_storage_units": 1}}})
        yield transfer_queue, folder
        transfer_queue.close()


def empty(queue):
    for name, keys in queue.kv_list().items():
        if keys:
            queue.kv_clear(keys=list(keys), partition_id=name)


def opened(path, **settings):
    return DataLoader(path, tokenize_fn=RowFn(), **SETTINGS | settings)


def row_of(sample):
    return {"row": sample.extra}


class Run:
    """A trainer with a queue, a loader, and what was trained when each of the two was saved."""

    def __init__(self, path, real, room=ROOM, **settings):
        self.path, self.trained = path, []
        self.queue, self.folder = real
        self.room, self.settings = room, settings
        self.is_saved, self.at_queue = False, 0
        empty(self.queue)
        self.open()
        self.save_loader()

    def open(self):
        self.loader = opened(self.path, **self.settings)
        self.feeder = QueueFeeder(self.loader, self.room, fields=row_of, tag=VERL_TAG)

    def prompts(self):
        return sorted(key for key in self.queue.kv_list(PARTITION).get(PARTITION, {}) if "_" not in key)

    def fill(self, _=0):
        self.feeder.fill()
        assert len(self.prompts()) <= self.room

    def roll_out(self, which):
        """Keys of rollouts stand beside the prompt's, which may go before them."""
        if prompts := self.prompts():
            key = prompts[which % len(prompts)]
            self.queue.kv_put(key=f"{key}_0_0", partition_id=PARTITION, tag={"status": "success"})

    def train(self, which):
        if prompts := self.prompts():
            key = prompts[which % len(prompts)]
            [row] = self.queue.kv_batch_get(keys=[key], partition_id=PARTITION, select_fields=["row"])["row"]
            names = [name for name in self.queue.kv_list(PARTITION)[PARTITION] if name.partition("_")[0] == key]
            self.queue.kv_clear(keys=names, partition_id=PARTITION)
            self.trained.append((key.partition(":")[0], getattr(row, "data", row)["id"]))

    def save_loader(self, _=0):
        self.state, self.at_loader = json.loads(json.dumps(self.feeder.state_dict())), len(self.trained)

    def save_queue(self, _=0):
        self.queue.save_checkpoint(self.folder)
        self.is_saved, self.at_queue = True, len(self.trained)

    def crash(self, _=0):
        """The weights are those of the later save."""
        self.loader.close()
        empty(self.queue)
        if self.is_saved:
            self.queue.load_checkpoint(self.folder)
        del self.trained[max(self.at_loader, self.at_queue) :]
        self.open()
        self.feeder.load_state_dict(self.state)
        assert self.loader.statistics().tracked_groups <= len(self.queue.kv_list(PARTITION).get(PARTITION, ())) + 1

    def finish(self):
        while self.feeder.fill() or self.prompts():
            self.train(0)
        self.loader.close()
        return sorted(self.trained)
