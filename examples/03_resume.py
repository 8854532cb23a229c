"""A training process is killed with SIGKILL. What follows its last snapshot is exactly what would have come next."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from asyncdata import DataLoader, PromptTokenizeFn, errors
from asyncdata.demo import tokenizer_folder, write_docstring_prompts


def open_loader(folder: Path, num_workers: int) -> DataLoader:
    tokenize_fn = PromptTokenizeFn(tokenizer_folder(), label_key="label", apply_chat_template=True)
    return DataLoader(folder / "prompts.jsonl", tokenize_fn=tokenize_fn, epochs=2, num_workers=num_workers)


def train_until_killed(folder: Path) -> None:
    """Prints the number of samples delivered after every snapshot, without an end."""
    with open_loader(folder, num_workers=2) as loader:
        while True:
            loader.get_next_batch(16)
            loader.save(folder / "run.snapshot")
            print(loader.statistics().samples_total, flush=True)


def rest_of(loader: DataLoader) -> list[tuple[str, bytes]]:
    """Position and tokens of everything that is still to come."""
    samples = []
    try:
        while True:
            samples += loader.get_next_batch(16)
    except errors.EndOfData as end:
        samples += end.samples
    return [(str(sample.position), sample.tokens.tobytes()) for sample in samples]


def main(folder: Path) -> None:
    num_rows = write_docstring_prompts(folder / "prompts.jsonl", num_rows=800)
    command = [sys.executable, __file__, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        reached = next(number for number in map(int, process.stdout) if number > num_rows)  # in the second epoch
        process.kill()
    print(f"killed after {reached} samples or a few more")

    with open_loader(folder, num_workers=1) as resumed, open_loader(folder, num_workers=3) as uninterrupted:
        resumed.restore(folder / "run.snapshot")
        num_done = resumed.statistics().samples_total
        everything = rest_of(uninterrupted)
        assert rest_of(resumed) == everything[num_done:]
    print(f"resumed at sample {num_done}: the other {len(everything) - num_done} are the same, tokens and all")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train_until_killed(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as name:
            main(Path(name))
