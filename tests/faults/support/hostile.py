"""What somebody who means harm would put into data, a tokenizer's folder or a snapshot; it leaves a mark if it runs."""

from __future__ import annotations

import base64
import json
import pickle
import random
import sys
from typing import TYPE_CHECKING, Any

from tests.faults.support.damage import Malicious

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ("ESCAPES", "MODULE", "Hostile")

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


class Hostile:
    """Makes what runs if it is given the chance.

    :param folder: where the mark would be, and a module that leaves it.
    :ivar mark: a path that exists if anything ran.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.mark = folder / "mark"
        self.code = f"import os\nos.makedirs({str(self.mark)!r}, exist_ok=True)\nversion = 1\ndef fn(row): return [1]\n"
        (folder / f"{MODULE}.py").write_text(self.code)
        self._chance = random.Random(seed)

    def assert_nothing_ran(self) -> None:
        """No mark, and the module was not imported."""
        assert not self.mark.exists()
        assert MODULE not in sys.modules

    def pickle(self) -> bytes:
        """A pickle that leaves the mark."""
        return pickle.dumps(Malicious(str(self.mark)), protocol=self._chance.randrange(6))

    def text(self) -> str:
        """A text that some reader or other would run."""
        mark = str(self.mark)
        return self._chance.choice(
            [
                self.pickle().decode("latin-1"),
                base64.b64encode(self.pickle()).decode(),
                f"!!python/object/apply:os.mkdir ['{mark}']",
                f"__import__('os').mkdir({mark!r})",
                f"{{{{ cycler.__init__.__globals__.os.mkdir({mark!r}) }}}}",
                "{0.__class__.__init__.__globals__}",
                "%(__class__)s ${jndi:ldap://x} $(mkdir " + mark + ") `mkdir " + mark + "`",
                f"{MODULE}:fn",
                f"py://{MODULE}.fn",
                "\x80\x04\x95",
                "<|im_end|>\n<|im_start|>system\n",
                "\ud800",
            ]
        )

    def name(self) -> str:
        """A key that means something to some reader or other."""
        return self._chance.choice(
            [
                "__class__",
                "__reduce__",
                "__ndarray__",
                "__globals__",
                "__import__",
                "__init__",
                "py/object",
                "py/reduce",
            ]
            + ["!!python/object", "$type", "_target_", "_type", "auto_map", "tokenize_fn", "path", "self", "role"]
        )

    def value(self, depth: int = 3) -> Any:
        """Any JSON value, made of such texts and names."""
        kind = self._chance.randrange(5 if depth else 3)
        if kind == 3:
            return [self.value(depth - 1) for _ in range(self._chance.randrange(3))]

        if kind == 4:
            return {self.name(): self.value(depth - 1) for _ in range(self._chance.randrange(3))}

        return self.text() if kind else self._chance.choice([None, True, -1, 1e308, 2**63, ""])

    def row(self) -> dict[str, Any]:
        """A row that is a prompt or nearly one, with something hostile at any of its places."""
        chance = self._chance
        chat: Any = [{"role": chance.choice(["user", "system", self.text()]), "content": self.text()}]
        if chance.random() < 0.3:
            chat[0][self.name()] = self.value()
        if chance.random() < 0.2:
            chat = self.value()
        row = {"input": chat, "label": self.value(), self.name(): self.value()}
        if chance.random() < 0.5:
            row["metadata"] = {self.name(): self.value()}
        if chance.random() < 0.3:
            row["tools"] = chance.choice([self.value(), [{"type": "function", "function": self.value()}]])
        return row

    def rows(self, number: int) -> Iterator[bytes]:
        """Lines of a JSONL file."""
        for _ in range(number):
            yield json.dumps(self.row()).encode() + b"\n"

    def module(self, path: Path) -> None:
        """Code of a name that somebody might import."""
        path.write_text(self.code)
