"""What the data sources of slime and miles deliver, and what BABILong's recipe makes of rows."""

import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.peers.records import digest, importable, module_of, recorded
from tests.support.slime_source import labels, numbers, slimes_args

TOKENIZER = str(Path(__file__).parents[3] / "asyncdata/assets/demo_tokenizer")
_EACH_PART = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ part.text if part.type == 'text' else '<|' ~ part.type ~ '|>' }}{% endfor %}{% endif %}"
)
TEMPLATES = {
    "slime": (
        "{{ eos_token }}{% if tools is not none %}{{ tools | tojson }}{% endif %}"
        "{% for message in messages %}<|user|>{{ message.role }}\n" + _EACH_PART + "<|end|>{% endfor %}{{ extra }}"
    ),
    "miles": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
        "{% for message in messages %}<|{{ message.role }}|>"
        + _EACH_PART
        + "{% for call in message.tool_calls or [] %}"
        "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}{% endfor %}"
        "<|end|>{% endfor %}{{ extra }}"
    ),
    "functions only": (
        "{% for tool in tools or [] %}"
        "{% if tool.function is defined %}{{ raise_exception('functions only') }}{% endif %}"
        "{{ tool.name }}: {{ tool | tojson }}{% endfor %}{% for message in messages %}{{ message.content }}{% endfor %}"
    ),
}


def args_of(folder: Path, args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a source, as an input has them; a template by its name."""
    made = {"label_key": "label", "hf_checkpoint": TOKENIZER, "save": str(folder), "load": str(folder), **args}
    if template := made.pop("template", None):
        made["apply_chat_template_kwargs"] = {"chat_template": TEMPLATES[template], "extra": "!"}
    return made


def theirs(peer: str, path: str, **args: Any) -> Any:
    """A peer's own data source; its reader wants a tokenizer even where it does nothing with it."""
    module = module_of(peer, "rollout.data_source")
    with importable(peer):
        return module.RolloutDataSourceWithBuffer(slimes_args(prompt_data=path, chat_template_path=None, **args))


def write_rows(folder: Path, given: dict[str, Any]) -> str:
    """A file of prompts of 2 to 9 words, or of chats with tools. Lines may be broken, and a slice asked for."""
    rows = [_chat(n) if given.get("chats") else _prompt(n) for n in range(given["rows"])]
    path = folder / ("rows.parquet" if given.get("parquet") else "rows.jsonl")
    if given.get("parquet"):
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    else:
        broken = given.get("broken", {})
        path.write_text("".join(broken.get(str(n)) or json.dumps(row) + "\n" for n, row in enumerate(rows)), newline="")
    return f"{path}{given.get('slice', '')}"


def _prompt(number: int) -> dict[str, Any]:
    text = f"prompt {number}" + " of words" * (number * 5 % 8)
    return {"input": text, "label": str(number), "metadata": {"row": number, "tags": ["a", "b"]}}


def _chat(number: int) -> dict[str, Any]:
    calls = [{"function": {"name": "add", "arguments": '{"a": 1}'}}]
    messages = [
        {"role": "user", "content": f"what is {number}?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "1"},
    ]
    tools = {"tools": [{"name": "add", "parameters": {"type": "object"}}]} if number % 2 else {}
    return {"input": messages, "label": str(number), **tools}


class Right:
    """A peer's data source, without what is wrong with it: a request is filled over as many epochs as it takes."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source.dataset)  # miles' has no length of its own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def get_samples(self, number: int) -> list[Any]:
        groups: list[Any] = []
        while len(groups) < number:
            room = len(self) - self.sample_offset % len(self) + len(self.buffer)
            groups += self._source.get_samples(min(number - len(groups), room))
        return groups


def content(groups: list[list[Any]]) -> list[list[dict[str, Any]]]:
    """Everything that is set in the samples; ours and a peer's are of two classes."""

    def is_set(value: Any) -> bool:
        return bool(any(value.values()) if isinstance(value, dict) else value)

    return [[{name: v for name, v in fields_of(sample).items() if is_set(v)} for sample in group] for group in groups]


def fields_of(sample: Any) -> dict[str, Any]:
    """Every attribute, as in slime's ``to_dict``; our class has none."""
    plain = {"status": sample.status.value}
    plain |= {name: vars(getattr(sample, name)) for name in ("spec_info", "prefix_cache_info")}
    return vars(sample) | plain


def place(source: Any) -> list[int]:
    return [source.epoch_id, source.sample_offset, source.sample_group_index, source.sample_index]


# Order, numbers and epochs


def served(source: Any, requests: list[int]) -> dict[str, Any]:
    """How many prompts there are; and by request: the rows, the place after it, and a digest of all that they hold."""
    found = []
    for number in requests:
        groups = source.get_samples(number)
        found.append([" ".join(labels(groups)), place(source), digest(content(groups))])
    return {"prompts": len(source.dataset), "served": found}


def _order(peer: str, folder: Path, **given: Any) -> Any:
    return served(Right(theirs(peer, write_rows(folder, given), **args_of(folder, given["args"]))), given["requests"])


# The buffer


def worked(source: Any, operations: list[Any], reopened: Callable[[Any], Any] = lambda source: source) -> list[Any]:
    """After each operation, a number to take or places to give back: the rows and groups, the place, and the groups of
    the buffer. ``reopened`` is done to the source after each tenth."""
    out, found = [], []
    for number, operation in enumerate(operations):
        groups = []
        if isinstance(operation, int):
            groups = source.get_samples(operation)
            out = (out + groups)[-40:]
        else:
            back = [out[place] for place in operation]
            out = [group for group in out if not any(group is each for each in back)]
            for sample in (sample for group in back for sample in group):
                sample.response += "x" * (sample.index % 3)
            source.add_samples(back)
        taken = zip(labels(groups), numbers(groups), strict=True)
        numbered = " ".join(f"{label}:{group}" for label, (group, _) in taken)
        buffer = " ".join(str(group) for group, _ in numbers(source.buffer))
        found.append([numbered, place(source), buffer, digest([content(groups), content(source.buffer)])])
        if number % 10 == 9:
            source = reopened(source)
    return found


@recorded("slime_buffer", "slime")
def _slime_buffer(folder: Path, **given: Any) -> Any:
    source = Right(theirs("slime", write_rows(folder, given), **args_of(folder, given["args"])))
    return worked(source, given["operations"])


# Checkpoints


def saved(folder: Path, given: dict[str, Any], opened: Any, others: list[Any] | None = None) -> Any:
    """By rollout, what is served by a source that is ``opened``, and the content of the file that is saved then. Each
    begins from the file before; if there are ``others``, every second one from one of those."""
    import torch

    path, args = write_rows(folder, given), args_of(folder, given["args"])
    found = []
    for rollout_id, number in enumerate(given["requests"]):
        with opened(path, **args) as source:
            source.load(rollout_id - 1)
            source.update_metadata({"rollouts": rollout_id})
            answer = served(source, [number])
            source.save(rollout_id)
        file = folder / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"
        found.append([answer, torch.load(file, weights_only=True)])
        if others and rollout_id % 2 == 0:
            for written in file.parent.iterdir():
                written.unlink()
            torch.save(others[rollout_id], file)
    return found


def _checkpoint(peer: str, folder: Path, **given: Any) -> Any:
    return saved(folder, given, lambda path, **args: contextlib.nullcontext(theirs(peer, path, **args)))


# Rows of any shape


def _rows(peer: str, folder: Path, **given: Any) -> list[Any]:
    """By file, the samples; None where the peer does not start. ``alone``: each line is a file."""
    files = [[line] for line in given["lines"]] if given.get("alone") else [given["lines"]]
    return [_samples(peer, folder, lines, given["args"]) for lines in files]


def _samples(peer: str, folder: Path, lines: list[str], args: dict[str, Any]) -> list[Any] | None:
    try:
        source = theirs(peer, write_lines(folder, lines), **args_of(folder, args))
    except Exception:  # whatever it is, training does not start
        return None
    return samples_of(source)


def write_lines(folder: Path, lines: list[str]) -> str:
    path = folder / "rows.jsonl"
    path.write_bytes(b"".join(line.encode() + b"\n" for line in lines))
    return str(path)


def samples_of(source: Any) -> list[Any]:
    return [[merged(sample.prompt), sample.label, sample.metadata] for sample in source.dataset.samples]


def merged(prompt: Any) -> Any:
    """Texts side by side as one: slime cuts the text of a row without media into single characters."""
    if not isinstance(prompt, list) or not all(isinstance(message, dict) for message in prompt):
        return prompt

    result = []
    for message in prompt:
        parts: list[Any] = []
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if _is_text(part) and parts and _is_text(parts[-1]):
                parts[-1] = {"type": "text", "text": parts[-1]["text"] + part["text"]}
            else:
                parts.append(part)
        result.append({**message, "content": parts} if parts else message)
    return result


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and set(part) == {"type", "text"} and isinstance(part["text"], str)


for _peer in ("slime", "miles"):
    for _deliver in (_order, _checkpoint, _rows):
        recorded(f"{_peer}{_deliver.__name__}", _peer)(functools.partial(_deliver, _peer))


# The class of samples


@recorded("slime_sample", "slime")
def _slime_sample(folder: Path) -> Any:
    return described(module_of("slime", "utils.types").Sample)


def described(kind: Any) -> Any:
    """Its fields and statuses, what it makes of a dict and makes one of, and what its rewards and responses count."""
    values = kind(index=3, response="r", status=kind.Status.ABORTED, loss_mask=[1, 0], response_length=2).to_dict()
    made = kind.from_dict(values | {"unknown": 5, "spec_info": {"spec_verify_ct": 4}})
    rewarded = [kind(reward=reward).get_reward_value(slimes_args(reward_key=key)) for reward, key in REWARDS]
    return {
        "default": kind().to_dict(),
        "statuses": {status.name: status.value for status in kind.Status},
        "values": values,
        "made": made.to_dict(),
        "effective_response_length": made.effective_response_length,
        "rewards": rewarded,
    }


REWARDS = ((1.5, None), ({"score": 2.0}, "score"))


RESERVE = 8


@recorded("babilong_recipe", "babilong")
def _babilong_recipe(folder: Path, story: list[str], noise: list[str], size: int, max_length: int) -> Any:
    from transformers import AutoTokenizer

    module, tokenizer = module_of("babilong", "babilong_utils"), AutoTokenizer.from_pretrained(TOKENIZER)
    (folder / "task.txt").write_text("\n".join(story * 2) + "\n")  # the last story of a file is never served
    sampler = module.SentenceSampler([{"text": text} for text in noise], tokenizer=tokenizer, min_sentence_len=2)
    tasks = module.TaskDataset(str(folder / "task.txt"))
    made = module.NoiseInjectionDataset(tasks, sampler, tokenizer, sample_size=size)[0]
    row = {"input": tokenizer.decode(made["input_tokens"]), "question": made["question"], "target": made["answer"]}
    return {"row": row, **recipe(tokenizer, row, max_length, RESERVE)}


def recipe(tokenizer: Any, row: dict[str, str], max_length: int, reserve: int) -> dict[str, list[int]]:
    """The recipe's own steps, by a tokenizer of transformers. A blank line follows the context."""
    prompt = f"{row['input']}\n\nQuestion: {row['question']}\nAnswer:"
    prompt_ids = tokenizer(prompt, add_special_tokens=True, truncation=True, max_length=max_length - reserve).input_ids
    answer_ids = tokenizer(f" {row['target']}", add_special_tokens=False).input_ids
    input_ids = (prompt_ids + answer_ids)[:max_length]
    labels = ([-100] * len(prompt_ids) + answer_ids)[:max_length]
    num_padding = max_length - len(input_ids)
    pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return {
        "input_ids": input_ids + [pad_id] * num_padding,
        "labels": labels + [-100] * num_padding,
        "attention_mask": [1] * len(input_ids) + [0] * num_padding,
    }
