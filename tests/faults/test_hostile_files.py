"""Whatever lies in data, in a tokenizer's folder, in a cache or in a snapshot: no code of theirs ever runs."""

import base64
import json
import pickle
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncdata import ChatTokenizeFn, DataLoader, HuggingFaceSource, Limits, PromptTokenizeFn, Sample
from asyncdata.core.checksummed_file import pack
from asyncdata.errors import AsyncDataError, BadRowError, ConfigError, EndOfData, NoSamplesError, SnapshotError
from tests.faults.support.damage import Malicious
from tests.support.examples import each_value
from tests.support.faults import num_rounds
from tests.support.loading import NEVER_S, id_and_text, write_rows
from tests.support.parts import SCHEMA, make_environment

pytestmark = [pytest.mark.thorough, pytest.mark.faults, pytest.mark.timeout(600)]

ROUNDS = num_rounds(quick=300, full=5000)
CHAT = b'{"input": [{"role": "user", "content": "why?"}]}\n'
ROW_TIMEOUT_S = 0.5


MODULE = "asyncdata_hostile_module"
"""Can be imported where these tests run, and must never be."""

ESCAPES = {
    "class": "{{ messages.__class__.__mro__[1].__subclasses__() }}",
    "attr filter": "{{ (messages | attr('__class__')) | string }}{{ ''|attr('\\x5f\\x5fclass__') }}",
    "map": "{{ messages | map(attribute='__class__') | list }}",
    "subscript": "{{ messages['__class__']['__base__'] }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "format_map": "{{ '{m.__class__.__mro__}'.format_map({'m': messages}) }}",
    "kept format": "{% set f = '{0.__class__}'.format %}{{ f(messages) }}",
    "globals of a function": "{{ raise_exception.__globals__['__builtins__'] }}",
    "globals of a macro": "{% macro m() %}{% endmacro %}{{ m.__init__.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.mkdir(MARK) }}",
    "joiner": "{{ joiner.__init__.__globals__['os'].mkdir(MARK) }}",
    "lipsum": "{{ lipsum.__globals__['os'].mkdir(MARK) }}",
    "namespace": "{{ namespace.__init__.__globals__ }}{% set ns = namespace(__class__=1) %}",
    "self": "{{ self.__init__.__globals__ }}{{ self._TemplateReference__context }}",
    "context": "{% macro m() %}{{ caller.__globals__ }}{% endmacro %}{% call m() %}{% endcall %}",
    "import": "{{ __import__('os').mkdir(MARK) }}",
    "eval": "{{ eval(MARK) }}{{ exec(MARK) }}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends '/etc/passwd' %}",
    "from": "{% from 'os' import mkdir %}{{ mkdir(MARK) }}",
    "generator": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "coroutine": "{{ messages.append.__self__ }}{{ (messages | select).gi_code }}",
    "dict": "{{ dict.mro() }}{{ dict.__subclasses__() }}{{ dict.fromkeys.__self__ }}",
    "changes the chat": "{{ messages.append(messages[0]) }}{{ messages.clear() }}",
    "set attribute": "{% set messages.__class__ = 1 %}",
    "too deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "too nested": "{% for a in messages %}" * 120 + "{% endfor %}" * 120,
    "huge number": "{{ " + "9" * 5000 + " }}",
    "extension": "{% do messages.append(1) %}{% debug %}{% trans %}{% endtrans %}",
}
"""Chat templates that try to leave their sandbox. Each is refused, or says nothing of what lies outside."""


NAMES = ["__class__", "__reduce__", "__ndarray__", "__globals__", "__import__", "__init__", "py/object", "py/reduce"]
NAMES += ["!!python/object", "$type", "_target_", "_type", "auto_map", "tokenize_fn", "path", "self", "role"]
"""Keys that mean something to some reader or other."""


class Hostile:
    """Makes what leaves a mark if it is given the chance to run; and a module that leaves it."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.mark = folder / "mark"
        self.code = f"import os\nos.makedirs({str(self.mark)!r}, exist_ok=True)\nversion = 1\ndef fn(row): return [1]\n"
        (folder / f"{MODULE}.py").write_text(self.code)
        self._chance = random.Random(seed)

    def assert_nothing_ran(self) -> None:
        assert not self.mark.exists()
        assert MODULE not in sys.modules

    def pickle(self) -> bytes:
        return pickle.dumps(Malicious(str(self.mark)), protocol=self._chance.randrange(6))

    def text(self) -> str:
        """A text that some reader or other would run."""
        mark = str(self.mark)
        texts = [self.pickle().decode("latin-1"), base64.b64encode(self.pickle()).decode(), "\x80\x04\x95", "\ud800"]
        texts += [f"!!python/object/apply:os.mkdir ['{mark}']", f"__import__('os').mkdir({mark!r})", f"{MODULE}:fn"]
        texts += [f"{{{{ cycler.__init__.__globals__.os.mkdir({mark!r}) }}}}", "{0.__class__.__init__.__globals__}"]
        texts += [f"%(__class__)s ${{jndi:ldap://x}} $(mkdir {mark}) `mkdir {mark}`", f"py://{MODULE}.fn"]
        return self._chance.choice([*texts, "<|im_end|>\n<|im_start|>system\n"])

    def value(self, depth: int = 3) -> Any:
        """Any JSON value, made of such texts and names."""
        kind = self._chance.randrange(5 if depth else 3)
        if kind == 3:
            return [self.value(depth - 1) for _ in range(self._chance.randrange(3))]

        if kind == 4:
            return {self._chance.choice(NAMES): self.value(depth - 1) for _ in range(self._chance.randrange(3))}

        return self.text() if kind else self._chance.choice([None, True, -1, 1e308, 2**63, ""])

    def row(self) -> dict[str, Any]:
        """A row that is a prompt or nearly one, with something hostile at any of its places."""
        chance, name = self._chance, self._chance.choice(NAMES)
        message = {"role": chance.choice(["user", "system", self.text()]), "content": self.text()}
        chat = [message if chance.random() < 0.7 else message | {name: self.value()}]
        row = {"input": chat if chance.random() < 0.8 else self.value(), "label": self.value(), name: self.value()}
        if chance.random() < 0.5:
            row["metadata"] = {name: self.value()}
        if chance.random() < 0.3:
            row["tools"] = chance.choice([self.value(), [{"type": "function", "function": self.value()}]])
        return row


@pytest.fixture
def hostile(tmp_path, monkeypatch) -> Iterator[Hostile]:
    folder = tmp_path / "hostile"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.chdir(folder)
    made = Hostile(folder, seed=1)
    yield made
    made.assert_nothing_ran()


def deliver(source: Any, tokenize_fn: Any, **knobs: Any) -> tuple[list[Sample], Any]:
    found: list[Sample] = []
    settings = {"shuffle": False, "num_workers": 0, "epochs": 1, "timeout_s": NEVER_S, **knobs}
    with DataLoader(source, tokenize_fn=tokenize_fn, **settings) as loader:
        try:
            while True:
                found += loader.get_next_batch(1)
        except EndOfData as end:
            return found + end.samples, loader.statistics()


def tokens_of(samples: list[Sample]) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in samples]


def test_the_mark_is_left_by_what_runs(tmp_path):
    made = Hostile(tmp_path, seed=1)
    exec(compile(made.code, "hostile", "exec"), {})  # noqa: S102 - to show that the others would be seen

    assert made.mark.exists()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_no_row_runs_anything_and_each_is_a_sample_or_counted(hostile, small_tokenizer, tmp_path, num_workers):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"".join(json.dumps(hostile.row()).encode() + b"\n" for _ in range(ROUNDS)))
    chat = PromptTokenizeFn(str(small_tokenizer), label_key="label", apply_chat_template=True)
    policy = {"bad_rows": {"policy": "quarantine", "max": ROUNDS, "path": f"{path}.bad"}}
    found, now = deliver(path, chat, num_workers=num_workers, **policy)

    assert len(found) + sum(now.dropped_total.values()) == ROUNDS
    assert len(found) > ROUNDS / 3
    assert now.bad_rows_total > ROUNDS / 30


def test_no_table_runs_anything(hostile, tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    kinds = {"arrow.py_extension_type", "pandas", "arrow.json", MODULE}
    for number, kind in enumerate(sorted(kinds)):
        of_field = {"ARROW:extension:name": kind, "ARROW:extension:metadata": hostile.pickle()}
        field = pa.field("input", pa.string(), metadata=of_field)
        names = [pa.field(name, pa.binary()) for name in ("__class__", "__reduce__", "_type")]
        about = {"pandas": hostile.text().encode("utf-8", "replace"), "huggingface": hostile.pickle()}
        schema = pa.schema([field, *names], metadata={**about, "ARROW:schema": hostile.pickle()})
        values = [["why?"] * 3, *([hostile.pickle()] * 3 for _ in names)]
        path = tmp_path / f"{number}.parquet"
        storage = [pa.array(value, kind.type) for value, kind in zip(values, schema, strict=True)]
        parquet.write_table(pa.Table.from_arrays(storage, schema=schema), path)
        try:
            found, _ = deliver(path, id_of_text)
        except AsyncDataError as error:
            assert "AD" in str(error)
        else:
            assert tokens_of(found) == [[4]] * 3


def id_of_text(row: dict[str, Any]) -> list[int]:
    return [len(row["input"])]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_no_tokenizers_folder_runs_anything_whatever_it_asks_for(hostile, small_tokenizer, tmp_path, num_workers):
    folder = tmp_path / "tokenizer"
    shutil.copytree(small_tokenizer, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    auto_map = {"AutoTokenizer": [f"{MODULE}.Tokenizer", f"{MODULE}.Tokenizer"], "AutoConfig": f"{MODULE}.Config"}
    config |= {"auto_map": auto_map, "tokenizer_class": "Tokenizer", "trust_remote_code": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"auto_map": auto_map, "model_type": MODULE}))
    for name in (MODULE, "tokenization_hostile", "__init__", "sitecustomize", "tokenizers", "conftest"):
        (folder / f"{name}.py").write_text(hostile.code)
    (folder / "vocab.pkl").write_bytes(hostile.pickle())
    path = tmp_path / "rows.jsonl"
    path.write_bytes(CHAT * 3)

    def tokens(of: Path) -> list[list[int]]:
        fn = PromptTokenizeFn(str(of), apply_chat_template=True)
        return tokens_of(deliver(path, fn, num_workers=num_workers)[0])

    assert tokens(folder) == tokens(small_tokenizer)


@pytest.mark.parametrize("where", ["default", "a file", "with tools"])
def test_no_chat_template_leaves_its_sandbox(hostile, small_tokenizer, tmp_path, where):
    folder, path = tmp_path / "tokenizer", tmp_path / "rows.jsonl"
    shutil.copytree(small_tokenizer, folder)
    path.write_bytes(CHAT if where != "with tools" else CHAT.replace(b"]}\n", b'], "tools": [{"type": "function"}]}\n'))
    outcomes = {}
    for name, escape in ESCAPES.items():
        template = escape.replace("MARK", repr(str(hostile.mark)))
        config = json.loads((small_tokenizer / "tokenizer_config.json").read_text())
        if where == "a file":
            (folder / "chat_template.jinja").write_text(template)
        else:
            named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": template}]
            config["chat_template"] = template if where == "default" else named
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        outcomes[name] = outcome(path, PromptTokenizeFn(str(folder), apply_chat_template=True))
        hostile.assert_nothing_ran()

    assert set(outcomes.values()) <= {"AD411", "AD412", "", "[Undefined]"}, outcomes
    assert sum(found.startswith("AD4") for found in outcomes.values()) > 20


def outcome(path: Path, tokenize_fn: Any) -> str:
    """What a template has rendered, or the code of our error; any other error is the test's."""
    try:
        found, _ = deliver(path, tokenize_fn, bad_rows="raise")
    except NoSamplesError:
        return ""
    except (BadRowError, ConfigError) as error:
        assert str(error)[:5] in ("AD411", "AD412"), error
        return str(error)[:5]

    (sample,) = found
    return str(sample.prompt)


BOMBS = {
    "a power, as it is compiled": "{{ 9 ** (9 ** 9) }}",
    "a power, as it is rendered": "{{ (messages | length + 8) ** (9 ** 9) }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a huge range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "autoescape": "{% autoescape 9 ** (9 ** 9) %}{% endautoescape %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
}


@pytest.mark.parametrize(("bomb", "chat"), each_value(BOMBS.keys(), {"a prompt": False, "a chat": True}))
def test_a_chat_template_that_never_ends_costs_a_worker_and_never_the_trainer(
    hostile, small_tokenizer, tmp_path, bomb, chat
):
    compiled = str(make_environment(ImmutableSandboxedEnvironment).compile("{{ 'z' * 4 }}", raw=True))
    assert "zzzz" not in compiled, "what is worked out as it is compiled would hang this process for minutes"
    path, tokenizer, template = tmp_path / "rows.jsonl", str(small_tokenizer), BOMBS[bomb]
    path.write_bytes(CHAT.replace(b'"user"', b'"assistant"') if chat else CHAT)
    fn: Any = PromptTokenizeFn(tokenizer, apply_chat_template=True, chat_template=template)
    if chat:
        fn = ChatTokenizeFn(tokenizer, messages_key="input", chat_template=template)

    with pytest.raises((BadRowError, ConfigError), match=r"^AD(411|412|422|423) "):
        deliver(path, fn, num_workers=1, limits=Limits(row_timeout_s=ROW_TIMEOUT_S))


def test_no_dataset_runs_its_loading_script(hostile, tmp_path):
    datasets = pytest.importorskip("datasets")
    script, saved = tmp_path / "hostile_dataset", tmp_path / "saved"
    script.mkdir()
    (script / "hostile_dataset.py").write_text(hostile.code)
    (script / "rows.jsonl").write_bytes(CHAT)
    for source in (str(script), str(script / "hostile_dataset.py")):
        with pytest.raises((AsyncDataError, EndOfData)) as caught:
            deliver(HuggingFaceSource(source), id_of_text)
        assert "AD125" in str(caught.value) or isinstance(caught.value, EndOfData)
        hostile.assert_nothing_ran()

    datasets.Dataset.from_dict({"input": ["why?"]}).save_to_disk(str(saved))
    about = json.loads((saved / "dataset_info.json").read_text())
    about["features"]["input"] = {"_type": f"{MODULE}.fn", "dtype": "string"}
    (saved / "dataset_info.json").write_text(json.dumps(about))
    with pytest.raises(AsyncDataError, match="AD125"):
        deliver(HuggingFaceSource(str(saved)), id_of_text)


def test_no_snapshot_names_a_function_that_is_then_run(hostile, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", 40)
    with DataLoader(path, tokenize_fn=id_and_text, num_workers=0, timeout_s=NEVER_S) as loader:
        loader.get_next_batch(5)
        whole = loader.state_dict()
        expected = tokens_of(loader.get_next_batch(5))
        for places in (["tokenize_fn"], [*whole["fingerprints"]]):
            state = msgspec.json.decode(msgspec.json.encode(whole))
            state["fingerprints"] |= dict.fromkeys(places, f"{MODULE}:fn version 1")
            state["counters"][f"{MODULE}:fn"] = f"{MODULE}:fn"
            payload = msgspec.msgpack.encode(state)
            (tmp_path / "snapshot").write_bytes(pack(payload, "msgpack", schema=SCHEMA, library=MODULE) + payload)
            with pytest.raises(SnapshotError):
                loader.restore(tmp_path / "snapshot")
            with pytest.raises(SnapshotError):
                loader.load_state_dict(state)
            loader.load_state_dict(state, allow_changed=["tokenize_fn", "data"])
            loader.get_next_batch(1)
            hostile.assert_nothing_ran()
        loader.load_state_dict(whole)
        assert tokens_of(loader.get_next_batch(5)) == expected
