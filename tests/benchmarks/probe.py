"""One measurement in a process of its own: ``python -m tests.benchmarks.probe NAME JSON`` prints one JSON object."""

from tests.benchmarks import clock  # isort: skip - the clock starts before anything else  # noqa: F401

import importlib
import json
import sys

PROBES = {
    "pictures": "draw_inputs film_inputs pictures plain_loop torch_loader trl_loader",
    "remote": "many_objects ranks remote_rate remote_wait streaming_rate streaming_wait",
    "tokens": "chat_template hf_ids load_vocabulary mismatches prove raw raw_in_processes rendered_chats",
}
"""The functions of modules; all others are in ``loading``."""


if __name__ == "__main__":
    name, arguments = sys.argv[1], json.loads(sys.argv[2])
    module = next((module for module, names in PROBES.items() if name in names.split()), "loading")
    print(json.dumps(getattr(importlib.import_module(f"tests.benchmarks.probes.{module}"), name)(**arguments)))
