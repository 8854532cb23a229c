"""One measurement in a process of its own: ``python -m tests.benchmarks.probe NAME JSON`` prints one JSON object."""

from tests.benchmarks import clock  # isort: skip - the clock starts before anything else  # noqa: F401

import importlib
import json
import sys

PROBES = {
    "loading": (*("contest", "delivered_ids", "first_batch", "first_run", "make_snapshots", "resume", "steady"),),
    "tokens": (
        *("chat_template", "hf_ids", "load_vocabulary", "mismatches", "prove", "raw", "raw_in_processes"),
        "rendered_chats",
    ),
    "trainer": ("busy_trainer", "call_cost", "data_wait", "group_calls", "idle_trainer"),
    "pictures": ("draw_inputs", "film_inputs", "pictures", "plain_loop", "torch_loader", "trl_loader"),
    "ranks": ("ranks",),
    "remote": ("many_objects", "remote_rate", "remote_wait", "streaming_rate", "streaming_wait"),
}


if __name__ == "__main__":
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    module = next(module for module, names in PROBES.items() if name in names)
    print(json.dumps(getattr(importlib.import_module(f"tests.benchmarks.probes.{module}"), name)(**arguments)))
