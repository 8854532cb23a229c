"""A feeder of the real TransferQueue, on Ray."""

from types import SimpleNamespace

import pytest

from tests.support.frameworks.transfer_queue import ALL, ROWS, Run
from tests.support.loading import write_rows


@pytest.fixture
def path(tmp_path):
    return write_rows(tmp_path / "rows.jsonl", ROWS)


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
def test_each_prompt_is_trained_once_whatever_was_saved_later_and_however_much_room_there_is(path, real):
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
    for room in (4, 8, 50):
        load(None)
        assert Run(path, store, room).finish() == ALL
