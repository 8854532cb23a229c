"""Whether the ids are those of ``tokenizers``: every row of a file, through a loader, beside plain encoding."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.probes.loading import BATCH, loader

__all__ = ("hf_ids", "mismatches", "prove")


def prove(path: str, tokenizer: str, backend: str) -> dict[str, float]:
    """Have one batch of a backend, so that whatever it does once per tokenizer has been done."""
    with loader(path, tokenizer, backend, num_workers=1) as made:
        return {"rows": len(made.get_next_batch(BATCH))}


def hf_ids(path: str, tokenizer: str, out: str) -> dict[str, float]:
    """Write the ids of all rows, as :func:`mismatches` wants them: ``out.ids`` int32, ``out.ends`` int64."""
    import numpy as np
    from tokenizers import Tokenizer

    engine = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    with open(path, "rb") as file:
        texts = [json.loads(line)["input"] for line in file]
    ids = [
        np.array(encoding.ids, np.int32)
        for start in range(0, len(texts), 1024)
        for encoding in engine.encode_batch_fast(texts[start : start + 1024], add_special_tokens=False)
    ]
    np.concatenate(ids).tofile(f"{out}.ids")
    np.cumsum([len(one) for one in ids]).astype(np.int64).tofile(f"{out}.ends")
    return {"rows": len(ids), "tokens": sum(map(len, ids)), "bytes": sum(map(len, texts))}


def mismatches(path: str, tokenizer: str, backend: str, expected: str) -> dict[str, float]:
    """Rows whose ids through a loader are not those that :func:`hf_ids` wrote. Rows of no token are none there."""
    import numpy as np

    ids, ends = np.fromfile(f"{expected}.ids", np.int32), np.fromfile(f"{expected}.ends", np.int64)
    wanted = [one for one in np.split(ids, ends[:-1]) if len(one)]
    num_rows = num_wrong = 0
    with loader(path, tokenizer, backend, num_workers=2, shuffle=False, epochs=1, batch_size=1024) as made:
        for batch in made:
            for sample in batch:
                num_wrong += num_rows >= len(wanted) or not np.array_equal(wanted[num_rows], sample.tokens)
                num_rows += 1
    return {"rows": len(wanted), "wrong": num_wrong + abs(len(wanted) - num_rows)}
