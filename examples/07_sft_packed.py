"""SFT on packed chats: a language model is trained, killed with SIGKILL between two checkpoints, and resumed.

The resumed run computes the losses of a run that was never interrupted, bit for bit; both are drawn. With ``--data``
and ``--tokenizer`` it trains on a chat file of your own (``{"messages": [...]}``).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from _docstring_data import write_chats
from _loss_curve import write_curves
from _tiny_model import TinyLM, loss_of, packed_mask
from tokenizers import Tokenizer

from asyncdata import ChatTokenizeFn, DataLoader, LengthGrouping, PackedCollator, SoftPacking
from asyncdata.demo import tokenizer_folder
from asyncdata.integrations.torch import StatefulDataLoader, ranks

SAVE_EVERY = 5


def open_loader(options: argparse.Namespace) -> StatefulDataLoader:
    """Two packs a batch; packs of like cost in the same optimizer step."""
    length = options.max_length
    loader = DataLoader(
        options.data,
        tokenize_fn=ChatTokenizeFn(options.tokenizer),
        packing=SoftPacking(max_length=length),
        length_grouping=LengthGrouping(window=16),
        collate_fn=PackedCollator(shift="document"),
        batch_size=2,
        num_workers=2,
        ranks=ranks(),
    )
    return StatefulDataLoader(loader)


def train(options: argparse.Namespace, checkpoint: Path, killed_at: int | None = None) -> dict[int, float]:
    """Train to the last step, from the checkpoint if there is one; the loss by step."""
    torch.manual_seed(0)
    model = TinyLM(Tokenizer.from_file(f"{options.tokenizer}/tokenizer.json").get_vocab_size(), options.max_length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses: dict[int, float] = {}
    with open_loader(options) as loader:
        if checkpoint.exists():
            saved = torch.load(checkpoint, weights_only=True)
            losses = saved["losses"]
            for name, part in {"model": model, "optimizer": optimizer, "loader": loader}.items():
                part.load_state_dict(saved[name])
        while len(losses) < options.steps:
            for batch in loader:  # one epoch, or what is left of it
                mask = packed_mask(batch["cu_seqlens"], num_rows=2)
                loss = loss_of(model(batch["input_ids"], batch["position_ids"], mask), batch["shifted_labels"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[len(losses)] = loss.item()
                if len(losses) == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                if len(losses) % SAVE_EVERY == 0:
                    parts = {"model": model, "optimizer": optimizer, "loader": loader}
                    states = {name: part.state_dict() for name, part in parts.items()}
                    save(checkpoint, states | {"losses": losses})
                if len(losses) == options.steps:
                    break
        figures = loader.statistics()
    packed = figures.packed_tokens_total / (figures.packs_total * options.max_length)
    print(f"step {len(losses)}, epoch {loader.epoch}: loss {loss.item():.3f}; packs are {packed:.1%} full")
    return losses


def save(checkpoint: Path, states: dict[str, object]) -> None:
    """Whole at every instant."""
    part = checkpoint.with_suffix(".part")
    torch.save(states, part)
    part.replace(checkpoint)


def main(options: argparse.Namespace, folder: Path) -> None:
    if options.data is None:
        options.data = str(folder / "chats.jsonl")
        write_chats(Path(options.data), num_rows=2000)
    killed_at = options.steps // 2 + 2  # not where a checkpoint is
    print("without interruption:")
    whole = train(options, folder / "whole.pt")

    print(f"killed behind step {killed_at}, with the last checkpoint {killed_at % SAVE_EVERY} steps before:")
    settings = json.dumps(vars(options) | {"killed": [str(folder / "killed.pt"), killed_at]})
    done = subprocess.run([sys.executable, __file__, "--settings", settings])
    assert done.returncode == -signal.SIGKILL

    print("resumed:")
    resumed = train(options, folder / "killed.pt")
    write_curves(
        Path(options.out),
        {"without interruption": whole, f"killed behind step {killed_at}, and resumed": resumed},
        "A packed SFT run, killed and resumed",
    )
    assert resumed == whole
    print(f"the {len(whole)} losses are the same, bit for bit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="a chat file; by default one is made of docstrings")
    parser.add_argument("--tokenizer", default=tokenizer_folder(), help="a folder with tokenizer.json")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max-length", type=int, default=256)
    parser.add_argument("--out", default=str(Path(tempfile.gettempdir()) / "07_sft_packed.png"))
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # the other cores are for the loader's workers
    if options.settings:
        settings = json.loads(options.settings)
        checkpoint, killed_at = settings.pop("killed")
        train(argparse.Namespace(**settings), Path(checkpoint), killed_at)
    else:
        with tempfile.TemporaryDirectory() as name:
            main(options, Path(name))
