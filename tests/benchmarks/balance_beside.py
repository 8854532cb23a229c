"""`balance` beside verl's and slime's own code, with the same lengths: how long ranks wait, budgets, time.

``python -m tests.benchmarks.balance_beside --verl /path/to/verl --slime /path/to/slime --sigma 0.8 --budget 16384``

Needs trees of verl and slime, and no package of theirs. Ranks wait for each other at each micro-batch: the stall is the
cost of the costliest at each, less their mean, all summed up, of the sum of the means. A row of n tokens costs
24576 n + n². verl (``_balance_batch``, ``rearrange_micro_batches``) differences the costs of rows into ranks with as
many rows each, then those of a rank into micro-batches, as many as the rank with the most tokens needs. slime
(``build_dp_schedule`` with ``balance_data``) packs by first fit, and differences the costs of micro-batches into ranks.
"""

import argparse
import ast
import heapq
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from asyncdata import balance
from tests.benchmarks.framework import show

Dealt = list[list[list[int]]]
MODEL = {"hidden_size": 4096, "num_attention_heads": 32, "num_query_groups": 8, "kv_channels": 128, "num_layers": 32}
DENSE = {"ffn_hidden_size": 14_336, "vocab_size": 128_256, "num_experts": None}
ROWS = {"micro_batch_size": None, "use_dynamic_batch_size": True, "balance_data": True}


def cost(length: int) -> int:
    return 24576 * length + length * length


def drawn(sigma: float, budget: int, num_rows: int, seed: int) -> list[int]:
    """Lengths of a log-normal law with a mean of 2,500 tokens, of 50 tokens to the budget."""
    lengths = np.random.default_rng(seed).lognormal(np.log(2500) - sigma**2 / 2, sigma, num_rows)
    return lengths.clip(50, budget).astype(int).tolist()  # type: ignore[no-any-return]


def verls(tree: Path) -> Callable[[list[int], int, int], Dealt]:
    """Its functions are taken out of the module, which imports its trainer."""
    source = ast.parse((tree / "verl/utils/seqlen_balancing.py").read_text())
    wanted = {"karmarkar_karp", "get_seqlen_balanced_partitions"}
    source.body = [one for one in source.body if isinstance(one, ast.FunctionDef) and one.name in wanted]
    names: dict[str, Any] = {"heapq": heapq}
    exec(compile(source, "verl", "exec"), names)  # noqa: S102
    split = names["get_seqlen_balanced_partitions"]

    def deal(lengths: list[int], ranks: int, budget: int) -> Dealt:
        costs, found = [cost(length) for length in lengths], []
        of_ranks = split(costs, ranks, equal_size=True)
        number = max(-(-sum(lengths[row] for row in rows) // budget) for rows in of_ranks)
        for rows in of_ranks:
            batches = [[rows[at] for at in batch] for batch in split([costs[row] for row in rows], number, False)]
            batches.sort(key=lambda batch: sum(costs[row] for row in batch), reverse=True)
            found.append(batches[::2][::-1] + batches[1::2])
        return found

    return deal


def slimes(tree: Path) -> Callable[[list[int], int, int], Dealt]:
    sys.path.insert(0, str(tree))
    from slime.utils.dp_schedule import build_dp_schedule

    def deal(lengths: list[int], ranks: int, budget: int) -> Dealt:
        args = SimpleNamespace(max_tokens_per_gpu=budget, balance_by_flops=False, **MODEL, **DENSE, **ROWS)
        parallel = {"dp_size": ranks, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        groups = {"global_batch_size": len(lengths), "rollout_indices": list(range(len(lengths)))}
        rows, batches, *_ = build_dp_schedule(args, parallel, lengths, **groups)
        return [[[mine[at] for at in batch] for batch in own] for mine, own in zip(rows, batches, strict=True)]

    return deal


def judged(lengths: list[int], found: Dealt, budget: int) -> dict[str, float]:
    batches = [batch for own in found for batch in own]
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    steps = np.array([[sum(cost(lengths[row]) for row in batch) for batch in own] for own in found])
    mean = steps.mean(axis=0).sum()
    return {
        "stall %": 100 * (steps.max(axis=0).sum() / mean - 1),
        "over budget": sum(sum(lengths[row] for row in batch) > budget for batch in batches),
        "micro-batches": len(found[0]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verl", type=Path)
    parser.add_argument("--slime", type=Path)
    parser.add_argument("--sigma", type=float, nargs="+", default=[0.5, 0.8, 1.0])
    parser.add_argument("--budget", type=int, nargs="+", default=[8192, 16_384, 32_768])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--draws", type=int, default=5)
    given = parser.parse_args()
    contestants: dict[str, Callable[[list[int], int, int], Dealt]] = {
        "balance": balance,
        "by cost": partial(balance, cost="attention"),
        **({"verl": verls(given.verl)} if given.verl else {}),
        **({"slime": slimes(given.slime)} if given.slime else {}),
    }
    for sigma, budget in product(given.sigma, given.budget):
        figures: dict[str, dict[str, list[float]]] = {name: {} for name in contestants}
        for seed, (name, deal) in product(range(given.draws), contestants.items()):
            lengths, times = drawn(sigma, budget, given.rows, seed), []
            for _ in range(10):
                start = time.perf_counter()
                found = deal(lengths, given.ranks, budget)
                times.append(1e3 * (time.perf_counter() - start))
            for what, value in {**judged(lengths, found, budget), "ms": min(times)}.items():
                figures[name].setdefault(what, []).append(value)
        for name, columns in figures.items():
            print(sigma, budget, f"{name:8}", *(f"{what} {show(values)}" for what, values in columns.items()))


if __name__ == "__main__":
    main()
