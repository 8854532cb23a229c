"""What the tests of slime's data source share: rows, arguments, and the driver's rollout id."""

import contextlib
import copy
import json
import sys
import threading
import types
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncdata.integrations.slime import AsyncDataSource
from asyncdata.integrations.slime.samples import SlimeSample as SlimeSample
from tests.support.peers.records import sglang, stand_ins

HOOKS = "slime.rollout.sample_hooks"

SLIMES_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("prompt_data", "hf_checkpoint", "dump_details", "rollout_max_prompt_len", "label_key")),
    **dict.fromkeys(("multimodal_keys", "buffer_filter_path", "save", "load")),
    **{"input_key": "input", "metadata_key": "metadata", "tool_key": "tools"},
    **{"rollout_global_dataset": True, "apply_chat_template": False, "apply_chat_template_kwargs": {}},
    **{"rollout_seed": 42, "rollout_shuffle": False, "n_samples_per_prompt": 1},
}


def write_prompts(path: Path, num_rows: int, special: dict[int, bytes] | None = None) -> Path:
    """Rows with a prompt, a label and metadata that tell their number; or the ``special`` line of that number."""
    rows = [
        {"input": f"prompt {i}", "label": str(i), "metadata": {"row": i, "tags": ["a", "b"]}} for i in range(num_rows)
    ]
    lines = {i: json.dumps(row).encode() for i, row in enumerate(rows)} | (special or {})
    path.write_bytes(b"".join(line + b"\n" for line in lines.values()))
    return path


def slimes_args(**given: Any) -> Namespace:
    """slime's arguments: its defaults, and what is given."""
    return Namespace(**{**SLIMES_DEFAULTS, **given})


def args_for(path: Path | str | None, **given: Any) -> Namespace:
    """The same for a source of ours, which works in this process and leaves nothing behind."""
    data = None if path is None else str(path)
    ours = {"asyncdata_num_workers": 0, "asyncdata_timeout_s": 240.0, "asyncdata_cache": {"folder": ""}}
    return slimes_args(**{"prompt_data": data, "label_key": "label", **ours, **given})


def source_of(path: Path | str | None, **given: Any) -> contextlib.closing[AsyncDataSource]:
    """A data source of ours, closed at the end."""
    return contextlib.closing(AsyncDataSource(args_for(path, **given)))


def labels(groups: list[list[Any]]) -> list[str]:
    """Which rows they are."""
    return [group[0].label for group in groups]


def numbers(groups: list[list[Any]]) -> list[tuple[Any, list[Any]]]:
    """Each group's number, and those of its samples."""
    return [(group[0].group_index, [sample.index for sample in group]) for group in groups]


def checkpoint_at(folder: Path | str, rollout_id: int) -> Path:
    """Our file of a checkpoint; slime's has the suffix ``.pt``."""
    return Path(folder, "rollout", f"global_dataset_state_dict_{rollout_id}.asyncdata")


class InMemory:
    """A dataset like slime's own, with labels from 0 on. It notes the epochs to which it was shuffled."""

    def __init__(self, num_rows: int) -> None:
        self.samples = [SlimeSample(label=str(number)) for number in range(num_rows)]
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def shuffle(self, epoch_id: int) -> None:
        self.epochs.append(epoch_id)


def source_over(dataset: Any, **given: Any) -> contextlib.closing[AsyncDataSource]:
    """A data source over a dataset that is not ours."""
    return source_of("unused", asyncdata_dataset=f"{__name__}.dataset_of_args", dataset=dataset, **given)


def set_rollout_id(rollout_id: int | None) -> None:
    """What slime's driver does at the start of each rollout; a module of its own stands in for slime's."""
    vars(sys.modules.setdefault(HOOKS, types.ModuleType(HOOKS)))["_current_rollout_id"] = rollout_id


@pytest.fixture
def no_rollout() -> Iterator[None]:
    """Nothing is being generated, before the test and after it."""
    before = sys.modules.pop(HOOKS, None)
    yield
    sys.modules.pop(HOOKS, None)
    if before is not None:
        sys.modules[HOOKS] = before


@contextlib.contextmanager
def runs_in_miles() -> Iterator[dict[str, str]]:
    """miles' modules, as far as ours asks them, and sglang's. It yields the kinds of models, by name."""
    chats = "miles.utils.chat_template_utils"
    kinds: dict[str, str] = {}
    contents: dict[str, dict[str, Any]] = {
        **{"miles": {}, "miles.utils": {}, chats: {}},
        "miles.utils.types": {"Sample": type("Sample", (SlimeSample,), {"__module__": "miles.utils.types"})},
        f"{chats}.deepseek": {"model_type": lambda model: kinds.get(model.name_or_path)},
        f"{chats}.inkling": {"is_inkling": lambda model: kinds.get(model.name_or_path) == "inkling"},
    }
    with stand_ins(contents), sglang():
        yield kinds


# Buffer filters


def newest_first(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """From the end, as slime's contract test does."""
    assert rollout_id is None
    selected = list(reversed(buffer[-num_samples:]))
    del buffer[-num_samples:]
    return selected


def keeps_everything(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    return buffer[:num_samples]


def returns_too_many(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """Removes and returns all but the oldest."""
    chosen = buffer[1:]
    del buffer[1:]
    return chosen


def copies_lists(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """Puts other lists in the place of the groups, and returns others still."""
    buffer[:] = [list(group) for group in buffer]
    return [list(group) for group in buffer[:num_samples]]


def drops_the_oldest(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """Removes one that it does not return."""
    del buffer[0]
    return [buffer.pop(0)]


def turns_round(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """Chooses nothing, and leaves another order."""
    buffer.reverse()
    return []


def asks_the_source(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    """Calls the data source, whose lock it runs under."""
    assert args.source[0].get_buffer_length() == len(buffer)
    return buffer[:num_samples]


def makes_groups(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    return [[copy.copy(sample) for sample in group] for group in buffer[:num_samples]]


def returns_twice(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    return [buffer[0]] * num_samples


def returns_nothing(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> None:
    buffer.clear()


def spoils_and_raises(args: Any, rollout_id: Any, buffer: list[Any], num_samples: int) -> list[Any]:
    buffer.clear()
    raise KeyError("thirteen")


# Other hooks


def process_media(args: Any, media: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Pictures, by their names."""
    if getattr(args, "broken", None):
        raise RuntimeError("no such picture")

    return {"images": [f"picture {name}" for name in media.get("images", ())]}


def as_they_are(args: Any, media: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return media


class Picture:
    """What no snapshot can hold."""

    def __init__(self, name: Any) -> None:
        self.name = str(name)


def process_media_to_objects(args: Any, media: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"images": [Picture(name) for name in media["images"]]}


def dataset_of_args(args: Any) -> Any:
    return args.dataset


class GatedRows:
    """A tokenize function that waits until it is opened."""

    multimodal_keys = max_length = None
    shows_media = False

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self.opened.wait()
        return {"input_ids": [], "label": row["metadata"]["row"]}
