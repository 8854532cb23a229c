"""What the data sources of slime and miles deliver: order, numbers, buffer, checkpoints, and rows of any shape."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.peers.checkouts import importable, module_of
from tests.support.peers.records import digest, recorded
from tests.support.slime_source import labels, numbers, slimes_args

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

__all__ = ("TOKENIZER", "content", "merged", "place", "served", "saved", "theirs", "worked", "write_rows")

TOKENIZER = str(Path(__file__).parents[3] / "asyncdata/assets/demo_tokenizer")
TEMPLATES = {
    "slime": (
        "{{ eos_token }}{% if tools is not none %}{{ tools | tojson }}{% endif %}"
        "{% for message in messages %}<|user|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}"
        "{{ part.text if part.type == 'text' else '<|' ~ part.type ~ '|>' }}{% endfor %}"
        "{% endif %}<|end|>{% endfor %}{{ extra }}"
    ),
    "miles": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
        "{% for message in messages %}<|{{ message.role }}|>"
        "{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}"
        "{{ part.text if part.type == 'text' else '<|' ~ part.type ~ '|>' }}{% endfor %}{% endif %}"
        "{% for call in message.tool_calls or [] %}"
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
    return [[_set(sample.to_dict()) for sample in group] for group in groups]


def _set(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value and not _is_unset(value)}


def _is_unset(value: Any) -> bool:
    return isinstance(value, dict) and not any(value.values())


def place(source: Any) -> list[int]:
    return [source.epoch_id, source.sample_offset, source.sample_group_index, source.sample_index]


# Order, numbers and epochs

# One row more or less would change the shuffle of all of them.
ODD = [
    '\u2028{"input": "line separator"}\n',
    '{"input": "ideographic space"}\u3000\n',
    '\x0c{"input": "form feed"}\x1f\n',
    '{"input": "carriage return"}\r{"input": "and again"}\r\n{"input": "and a newline"}\n',
    "\u3000\n",
    '{"input": "cut\n',
]


def _orders(rng: random.Random) -> Iterator[dict[str, Any]]:
    for number, rows in enumerate((1, 2, 3, 7, 7, 7, 100, 100, 100)):
        args = {"rollout_shuffle": number % 3 != 1, "rollout_seed": (0, 42, -3)[number % 3]}
        requests = [rng.choice([1, 1, 2, rng.randint(1, rows), rows, 2 * rows]) for _ in range(9)]
        yield {"rows": rows, "args": {**args, "n_samples_per_prompt": 2}, "requests": [*requests, 3 * rows + 1]}
    broken = {"2": "{\n", "5": " \n", "11": '{"input": 1\n'}
    for number, cut in enumerate(["[0:3]", "[3:]", "[:4]", "[-3:]", "[:-2]", "[1:-1]", "[:]"] * 2):
        args = {"rollout_shuffle": number < 7}
        yield {"rows": 12, "broken": broken, "slice": f"@{cut}", "args": args, "requests": [1, 2, 3, 3, 1, 2, 9]}
    odd = {str(number): line.replace("}", ', "label": "odd"}') for number, line in enumerate(ODD)}
    for number in range(4):
        args = {"rollout_shuffle": number > 1, "rollout_max_prompt_len": [None, 50][number % 2]}
        yield {"rows": 20, "broken": odd, "args": args, "requests": [9, 30]}
    for longest in (7, 12, 100):
        args = {"rollout_shuffle": True, "rollout_max_prompt_len": longest}
        yield {"rows": 40, "args": args, "requests": [9, 40, 40]}
    for cut in ("", "@[1:-2]"):
        for shuffled in (True, False):
            args = {"rollout_shuffle": shuffled, "n_samples_per_prompt": 2}
            yield {"rows": 50, "parquet": True, "slice": cut, "args": args, "requests": [20, 47, 3, 60]}


def served(source: Any, requests: list[int]) -> dict[str, Any]:
    """How many prompts there are; and by request: the rows, the place after it, and a digest of all that they hold."""
    found = []
    for number in requests:
        groups = source.get_samples(number)
        found.append([" ".join(labels(groups)), place(source), digest(content(groups))])
    return {"prompts": len(source.dataset), "served": found}


@recorded("slime_order", "slime", _orders)
def _slime_order(folder: Path, **given: Any) -> Any:
    return served(
        Right(theirs("slime", write_rows(folder, given), **args_of(folder, given["args"]))), given["requests"]
    )


def _orders_of_chats(rng: random.Random) -> Iterator[dict[str, Any]]:
    for shuffled in (True, False):
        args = {"rollout_shuffle": shuffled, "n_samples_per_prompt": 2, "rollout_max_prompt_len": 200}
        args |= {"apply_chat_template": True, "template": "miles"}
        yield {"rows": 12, "chats": True, "args": args, "requests": [5, 7, 3, 12, 12, 12, 9]}
        yield {"rows": 20, "args": {"rollout_shuffle": shuffled}, "requests": [7, 20, 20, 1, 33]}


@recorded("miles_order", "miles", _orders_of_chats)
def _miles_order(folder: Path, **given: Any) -> Any:
    return served(
        Right(theirs("miles", write_rows(folder, given), **args_of(folder, given["args"]))), given["requests"]
    )


# The buffer


def _works(rng: random.Random) -> Iterator[dict[str, Any]]:
    for by, num_operations in ((None, 25), ("tests.support.slime_source.newest_first", 25), (None, 120)):
        operations: list[Any] = []
        num_out = 0
        for _ in range(num_operations):
            if num_out and rng.random() < 0.4:
                back = rng.sample(range(num_out), rng.randint(1, min(6, num_out)))
                operations.append(back)
                num_out -= len(back)
            else:
                operations.append(rng.choice([0, 1, 2, 5, 12, 23, 50]))
                num_out = min(num_out + operations[-1], 40)
        args = {"rollout_shuffle": True, "n_samples_per_prompt": 2, "buffer_filter_path": by}
        yield {"rows": 23, "args": args, "operations": operations}


def worked(source: Any, operations: list[Any], reopened: Callable[[Any], Any] = lambda source: source) -> list[Any]:
    """After each operation, a number to take or places to give back: the rows and groups, the place, and the
    groups of the buffer.

    :param reopened: what is done to the source after each tenth.
    """
    out: list[Any] = []
    found: list[Any] = []
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
        numbered = " ".join(
            f"{label}:{group}" for label, (group, _) in zip(labels(groups), numbers(groups), strict=True)
        )
        buffer = " ".join(str(group) for group, _ in numbers(source.buffer))
        found.append([numbered, place(source), buffer, digest([content(groups), content(source.buffer)])])
        if number % 10 == 9:
            source = reopened(source)
    return found


@recorded("slime_buffer", "slime", _works)
def _slime_buffer(folder: Path, **given: Any) -> Any:
    source = Right(theirs("slime", write_rows(folder, given), **args_of(folder, given["args"])))
    return worked(source, given["operations"])


# Checkpoints


def _saves(rng: random.Random) -> Iterator[dict[str, Any]]:
    for shuffled in (True, False):
        args = {"rollout_shuffle": shuffled, "n_samples_per_prompt": 2}
        yield {"rows": 20, "args": args, "requests": [7] * 8}


def saved(folder: Path, given: dict[str, Any], opened: Any, others: list[Any] | None = None) -> Any:
    """By rollout, what is served and the content of the file that is saved then. Each begins from the file before.

    :param opened: a context manager of a data source.
    :param others: what the file has instead of that, for every second rollout.
    """
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


@recorded("slime_checkpoint", "slime", _saves)
def _slime_checkpoint(folder: Path, **given: Any) -> Any:
    return saved(folder, given, lambda path, **args: contextlib.nullcontext(theirs("slime", path, **args)))


@recorded("miles_checkpoint", "miles", _saves)
def _miles_checkpoint(folder: Path, **given: Any) -> Any:
    return saved(folder, given, lambda path, **args: contextlib.nullcontext(theirs("miles", path, **args)))


# Rows of any shape


def _text(rng: random.Random, *marks: str) -> str:
    return "".join(rng.choices([*'ab \n\t"\\<>|é\u3000\u2028😀\ud800', *marks * 4], k=rng.randrange(6)))


def _value(rng: random.Random, depth: int = 2) -> Any:
    kind = rng.randrange(8 if depth else 6)
    if kind >= 6:
        items = [_value(rng, depth - 1) for _ in range(rng.randrange(4))]
        return items if kind == 6 else {_text(rng): item for item in items}
    number = rng.choice([rng.randint(-(2**70), 2**70), rng.randrange(-5, 5)])
    return [
        None,
        rng.random() < 0.5,
        number,
        rng.choice([1e300, 0.1, -0.0, float("nan"), float("inf")]),
        *[_text(rng)] * 2,
    ][kind]


def _some(rng: random.Random, row: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: make() for name, make in row.items() if rng.random() < 0.6}


def _message(rng: random.Random) -> dict[str, Any]:
    parts = [rng.choice([{"type": "text", "text": _text(rng)}, {"type": "image", "image": "a"}]) for _ in range(2)]
    content = rng.choice([_text(rng, "<image>", "<video>"), parts, _text(rng)])
    more = _some(rng, {"note": lambda: _value(rng), "reasoning_content": lambda: _text(rng)})
    return {"role": rng.choice(["user", "assistant", "system"]), "content": content, **more}


def _slime_row(rng: random.Random) -> dict[str, Any]:
    tools = [{"type": "function", "function": {_text(rng): _value(rng)}} for _ in range(rng.randrange(3))]
    optional = {
        "metadata": lambda: rng.choice([_value(rng), {_text(rng): _value(rng)}]),
        "tools": lambda: rng.choice([tools, json.dumps(tools)]),
        "images": lambda: rng.choice([None, [_text(rng)], [{"type": "image", "image": "a"}, "b"]]),
        "videos": lambda: [_text(rng)] * rng.randrange(2),
    }
    messages = [_message(rng) for _ in range(rng.randint(1, 3))]
    prompt = rng.choice([_text(rng, "<image>", "<video>", "<audio>"), messages])
    return {"input": prompt, "label": _value(rng), **_some(rng, optional)}


def _odd_row(rng: random.Random) -> dict[str, Any]:
    names = ("input", "label", "metadata", "tools", "images")
    row = _some(rng, {name: lambda: _value(rng, 3) for name in names})
    if row.get("tools", 0) is None:
        del row["tools"]  # slime refuses null; here it says that there are none
    return row


def _line(rng: random.Random, row: dict[str, Any]) -> str:
    written = json.dumps(row, ensure_ascii=rng.random() < 0.5)
    return written if written.isascii() or "\ud800" not in written else json.dumps(row)


def _damaged(rng: random.Random) -> str:
    line = _line(rng, {"input": _text(rng), "metadata": {"a": _value(rng)}})
    at, more = rng.randrange(len(line) + 1), '{}[]",:\\/eE+-.019nulltrefas \t\x00\x1f\x7f\u00a0'
    return line[:at] + "".join(rng.choices(more, k=rng.randrange(4))) + line[at + rng.randrange(4) :]


MALFORMED = [
    "", "   ", "\t\r", "{", '{"input": "cut', '{"input": "a"} x', '{"input": \x01}', '{"input": "a\tb"}',
    "{'input': 'a'}", '{"input": "a",}', '{"input": 01}', "nul", '{"input": .5}', '{"input": "\\x41"}',
    '{"input": "a", "other": 01}', '{"input": "a", "other": "\\ud8"}', '{"input": "a", "other": "\x02"}',
]  # fmt: skip
FINE = [
    '{"input": "a", "other": NaN}', '{"input": "b", "x": [-Infinity, 1e400, "\\ud800"]}', ' {"input": "c"} \r',
    '\u3000{"input": "d"}\u00a0', '{"input": "k"}\r{"input": "l"}', '\r\x0c{"input": "m"}\x1f\r\n',
    '{"input": "e", "input": "f"}', '{"input": "g\u2028h\u0085i"}', '\x1f{"input": ""}',
    '{"input": "\\ud83d\\ude00", "metadata": {"n": NaN, "big": 123456789012345678901234567890, "z": -0, "f": 1.0}}',
    '{"input": "j", "metadata": {"e": 1E5, "tiny": 1e-400, "long": 0.1000000000000000055511151231257827021181583404}}',
]  # fmt: skip
MEDIA = [
    {"input": "see <image> and <image>", "images": ["a", "b"]},
    {"input": [{"role": "user", "content": "<image>"}], "images": [{"path": "a"}]},
    {"input": [{"role": "user", "content": [{"type": "image", "image": "a"}]}], "images": []},
    {"input": "<image>", "images": []}, {"input": "none", "images": []},
]  # fmt: skip
KEYS: list[Any] = [None, {}, {"image": "images"}, {"image": "images", "video": "videos"}]


def _rows(rng: random.Random) -> Iterator[dict[str, Any]]:
    """Files of rows; ``alone``: a line that stops the peer's start stops that of no other."""
    for number in range(8):
        args = {"apply_chat_template": number % 2 == 0, "template": "slime", "multimodal_keys": KEYS[number // 2 % 4]}
        args |= {"label_key": ["label", None][number // 4 % 2], "tool_key": ["tools", None][number % 3 // 2]}
        yield {"args": args, "alone": True, "lines": [_line(rng, _slime_row(rng)) for _ in range(8)]}
        odd = args | {"rollout_max_prompt_len": [None, 0, 5][number % 3]}
        yield {"args": odd, "alone": True, "lines": [json.dumps(_odd_row(rng)) for _ in range(8)]}
    bare: dict[str, Any] = {"label_key": None}
    yield {"args": bare, "lines": [_damaged(rng) for _ in range(60)], "alone": True}
    for _ in range(2):
        yield {"args": bare, "lines": rng.sample([*MALFORMED, *FINE, *FINE], 2 * len(FINE) + len(MALFORMED))}
    words = ["", "a", "the ", "self.", "<|end|>", " \n", "é", "日本", "\t", "function "]
    counted = ["".join(rng.choices(words, k=rng.randrange(6))) for _ in range(25)]
    for longest in (0, 1, 2, 3, 8, 12):
        args = {**bare, "rollout_max_prompt_len": longest, "apply_chat_template": longest % 2 == 0}
        yield {"args": args, "lines": [json.dumps({"input": text}) for text in counted]}
    for kinds in ("sp" * 3, "sLspSp", "ssss", "pLp", "LLp"):  # with an image or plain, and long ones of both
        rows = [f"p{n}" + " long" * (50 * kind.isupper()) + "<image>" * (kind in "sS") for n, kind in enumerate(kinds)]
        args = {**bare, "rollout_max_prompt_len": 20, "apply_chat_template": True, "template": "slime"}
        lines = [json.dumps({"input": row, **({"images": ["i"]} if "<" in row else {})}) for row in rows]
        yield {"args": args | {"multimodal_keys": {"image": "images"}}, "lines": lines}
    chats = [{"input": [{"role": "user", "content": "why " * number}]} for number in (1, 99)]
    yield {"args": {**bare, "rollout_max_prompt_len": 1}, "lines": list(map(json.dumps, chats))}  # no string: no filter


@recorded("slime_rows", "slime", _rows)
def _slime_rows(folder: Path, **given: Any) -> Any:
    return _read("slime", folder, given)


def _function(rng: random.Random) -> dict[str, Any]:
    more = {"description": lambda: rng.choice([None, "d"]), "parameters": lambda: _value(rng), "strict": lambda: True}
    return {"name": _text(rng), **_some(rng, {**more, "unknown": lambda: _value(rng)})}


def _miles_row(rng: random.Random) -> dict[str, Any]:
    tools = [rng.choice([_function(rng), {"function": _function(rng), "unknown": 1}]) for _ in range(rng.randrange(3))]
    arguments = {"a": _value(rng), "b": 1}
    call = {"function": {"name": "f", "arguments": rng.choice([arguments, json.dumps(arguments)])}, "id": "1"}
    answer = _some(rng, {"content": lambda: rng.choice([None, "c"]), "tool_calls": lambda: rng.choice([None, [call]])})
    turns = [{"role": "user", "content": _text(rng)}, {"role": "assistant", **answer}, {"role": "tool", "content": "t"}]
    prompt = rng.choice([_text(rng), turns, turns, turns])
    return {
        "input": prompt,
        "label": _value(rng),
        **_some(rng, {"tools": lambda: rng.choice([tools, json.dumps(tools)])}),
    }


def _odd_chat(rng: random.Random) -> dict[str, Any]:
    message = {"role": "assistant", **_some(rng, {"tool_calls": lambda: _value(rng), "content": lambda: _value(rng)})}
    return {"input": [message], "label": 1, **_some(rng, {"tools": lambda: [{"function": _value(rng)}]})}


def _rows_of_miles(rng: random.Random) -> Iterator[dict[str, Any]]:
    for number in range(6):
        args = {"template": ["miles", "functions only"][number % 2], "apply_chat_template": number != 4}
        yield {"args": args, "alone": True, "lines": [_line(rng, _miles_row(rng)) for _ in range(8)]}
        args |= {"multimodal_keys": {"image": "images"}, "label_key": None}
        yield {"args": args, "alone": True, "lines": list(map(json.dumps, MEDIA))}
    args = {"template": "miles", "apply_chat_template": True}
    yield {"args": args, "alone": True, "odd": True, "lines": [json.dumps(_odd_chat(rng)) for _ in range(24)]}


@recorded("miles_rows", "miles", _rows_of_miles)
def _miles_rows(folder: Path, **given: Any) -> Any:
    return _read("miles", folder, given)


def _read(peer: str, folder: Path, given: dict[str, Any]) -> list[Any]:
    """By file, the samples; None where the peer does not start."""
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


# The class of samples


@recorded("slime_sample", "slime", lambda rng: [{}])
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
