"""Processes of tensor and context parallelism are one rank: they get the same rows. Four processes, over gloo."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]
NUM_PROCESSES = 4
BEGIN = """
import json, os, sys
import torch.distributed as dist
from asyncdata.integrations.torch import exchange, ranks
process = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=process, world_size=4)
"""
MESH = """
from torch.distributed.device_mesh import init_device_mesh
group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"].get_group()
place = ranks(group)
print(json.dumps([place.rank, place.world_size, [int(each) for each in exchange(group)(b"%d" % process)]]))
"""
TRAINER = """
from accelerate import ParallelismConfig
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from asyncdata import DataLoader, RowFn
from asyncdata.errors import ConfigError
from asyncdata.integrations.transformers import attach, placeholder

ParallelismConfig._validate_accelerator = lambda *_: None  # it demands GPUs, and all else is done on CPUs too
folder, rows, parallel = sys.argv[2], sys.argv[3], ParallelismConfig(**json.loads(sys.argv[4]))
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
quiet = {"use_cpu": True, "report_to": [], "ddp_backend": "gloo", "disable_tqdm": True, "max_steps": 2}
args = TrainingArguments(folder, per_device_train_batch_size=2, parallelism_config=parallel, **quiet)
numbered = Dataset.from_list([{"labels": [number]} for number in range(32)])
trainer = Trainer(LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)), args=args, train_dataset=numbered)
own = [number for batch in trainer.get_train_dataloader() for number in batch["labels"].flatten().tolist()]

def attached(place):
    knobs = {"tokenize_fn": RowFn(), "num_workers": 0, "batch_size": 2, "epochs": 1, "timeout_s": 240}
    knobs["collate_fn"] = lambda batch: [each.extra["number"] for each in batch]
    with DataLoader(rows, ranks=place, **knobs) as made:
        attach(trainer, made)
        return sum(trainer.get_train_dataloader(), [])

try:
    attached({"rank": process, "world_size": 4})
    refused = ""
except ConfigError as error:
    refused = str(error)
place = ranks()
print(json.dumps([place.rank, place.world_size, own, attached(place), refused]))
"""


def said(tmp_path, program, *arguments):
    """What each process prints last."""
    processes = []
    for rank in range(NUM_PROCESSES):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_PROCESSES), "LOCAL_WORLD_SIZE": "4"}
        words = [sys.executable, "-W", "ignore", "-c", BEGIN + program, str(tmp_path / "store"), *arguments]
        environment = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
        processes.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment))
    return [json.loads(process.communicate(timeout=500)[0].splitlines()[-1]) for process in processes]


def test_with_the_group_of_data_parallelism_the_others_are_one_rank(tmp_path):
    found = said(tmp_path, MESH)
    assert found == [[0, 2, [0, 2]], [0, 2, [1, 3]], [1, 2, [0, 2]], [1, 2, [1, 3]]]


@pytest.mark.parametrize("sizes", [{"tp_size": 2, "dp_shard_size": 2}, {"tp_size": 2, "cp_size": 2}])
def test_under_accelerate_processes_share_rows_as_under_its_own_loader(tmp_path, jsonl_file, sizes):
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    rows = jsonl_file([{"number": number} for number in range(32)])
    found = said(tmp_path, TRAINER, str(tmp_path / "out"), str(rows), json.dumps(sizes))
    for process, (rank, world_size, own, ours, refused) in enumerate(found):
        assert (rank, world_size) == (process // (4 // world_size), sizes.get("dp_shard_size", 1))
        assert [own == other[2] for other in found] == [ours == other[3] for other in found]
        assert f"the loader is rank {process} of 4, and the trainer rank {rank} of {world_size}: pass ranks=" in refused
    assert set(sum((each[3] for each in found), [])) == set(range(32))
