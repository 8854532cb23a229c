"""Questions over a long context, at a fixed length, on two ranks (DDP with gloo); resumed in the middle of an epoch.

Run by itself it starts ``torchrun`` twice: once for the whole run, which leaves a checkpoint halfway, and once to
resume from that. Under ``torchrun --nproc_per_node=2`` it is one run. With ``--data`` and ``--tokenizer`` it takes
files of BABILong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from _docstring_data import write_babilong
from _loss_curve import write_curves
from _tiny_model import TinyLM, causal_mask, loss_of
from tokenizers import Tokenizer
from torch.nn.parallel import DistributedDataParallel

from asyncdata import DataLoader, FixedCollator, FixedLengthTokenizeFn, RowShuffle
from asyncdata.demo import tokenizer_folder
from asyncdata.integrations.torch import StatefulDataLoader, ranks


def open_loader(options: argparse.Namespace, part: Literal["train", "eval"]) -> StatefulDataLoader:
    """This rank's share of one part of the rows, which is all that this rank tokenizes."""
    length = options.max_length
    tokenize_fn = FixedLengthTokenizeFn.babilong(options.tokenizer, length, overlong="truncate_context_middle")
    loader = DataLoader(
        options.data,
        tokenize_fn=tokenize_fn,
        shuffle=RowShuffle(part=part, train_ratio=0.9, only_kept=True),
        collate_fn=FixedCollator(length=length, shift_labels=True),
        batch_size=options.batch_size,
        epochs=1 if part == "eval" else None,
        ranks=ranks(round_up=part == "train"),  # as many batches of each rank, or the last gradient would wait for ever
        num_workers=0,  # a thread is enough for so small rows
    )
    return StatefulDataLoader(loader)


def mean_over_ranks(value: torch.Tensor) -> float:
    value = value.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def loss_on(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    mask = causal_mask(*batch["input_ids"].shape)
    return loss_of(model(batch["input_ids"], batch["position_ids"], mask), batch["shifted_labels"])


def train(options: argparse.Namespace) -> None:
    """One run, as one of its ranks. Rank 0 writes the losses, and a checkpoint halfway."""
    torch.manual_seed(0)
    vocabulary = Tokenizer.from_file(f"{options.tokenizer}/tokenizer.json").get_vocab_size()
    model = DistributedDataParallel(TinyLM(vocabulary, options.max_length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: dict[int, float] = {}
    with open_loader(options, "train") as loader:
        if options.resume:
            saved = torch.load(options.resume, weights_only=True)  # rank 0's, for every rank
            losses = saved["losses"]
            for name, part in {"model": model, "optimizer": optimizer, "loader": loader}.items():
                part.load_state_dict(saved[name])
        while len(losses) < options.steps:
            for batch in loader:
                loss = loss_on(model, batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[len(losses)] = mean_over_ranks(loss)
                if len(losses) == options.steps // 2 and dist.get_rank() == 0:
                    parts = {"model": model, "optimizer": optimizer, "loader": loader}
                    states = {name: part.state_dict() for name, part in parts.items()}
                    torch.save(states | {"losses": losses}, Path(options.folder) / "halfway.pt")
                if len(losses) == options.steps:
                    break
    evaluated = evaluate(options, model.module)
    if dist.get_rank() == 0:
        Path(options.folder, "losses.json").write_text(json.dumps(losses))
        print(f"step {len(losses)}: loss {losses[len(losses) - 1]:.3f}, on unseen rows {evaluated:.3f}")


@torch.no_grad()
def evaluate(options: argparse.Namespace, model: torch.nn.Module) -> float:
    """The mean loss of the rows that are not trained on, of all ranks."""
    total = torch.zeros(2, dtype=torch.float64)
    with open_loader(options, "eval") as loader:
        for batch in loader:
            num_rows = len(batch["input_ids"])
            total += torch.tensor([loss_on(model, batch).item() * num_rows, num_rows])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def as_rank(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    try:
        if options.data is None:
            options.data = str(Path(options.folder) / "stories.jsonl")
            if dist.get_rank() == 0:
                write_babilong(Path(options.data), num_rows=800, num_words=options.max_length // 3)
            dist.barrier()
        train(options)
        dist.barrier()  # no rank leaves while another still needs it
    finally:
        dist.destroy_process_group()


def launch(folder: Path, *words: str) -> dict[int, float]:
    """The losses of a run on two ranks, by step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, __file__, *sys.argv[1:], "--folder", folder, *words], check=True, env=environment)
    return {int(step): loss for step, loss in json.loads((folder / "losses.json").read_text()).items()}


def main(options: argparse.Namespace, folder: Path) -> None:
    print("without interruption:", flush=True)
    whole = launch(folder)
    print(f"resumed at step {options.steps // 2}:", flush=True)
    resumed = launch(folder, "--resume", str(folder / "halfway.pt"))
    curves = {"without interruption": whole, "resumed halfway": dict(list(resumed.items())[options.steps // 2 :])}
    write_curves(Path(options.out), curves, "Two ranks, BABILong at a fixed length, resumed")
    assert resumed == whole
    print(f"the {len(whole)} losses are the same, bit for bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a file of BABILong; by default one is made of docstrings")
    parser.add_argument("--tokenizer", default=tokenizer_folder(), help="a folder with tokenizer.json")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--out", default=str(Path(tempfile.gettempdir()) / "08_babilong_fixed_length.png"))
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where a run writes its losses and checkpoint")
    parser.add_argument("--resume", help="a checkpoint of an earlier run")
    options = parser.parse_args()
    if "RANK" in os.environ:
        as_rank(options)
    else:
        with tempfile.TemporaryDirectory() as name:
            main(options, Path(name))
