"""The proxies that stand for the values of a chat, and the record of what a template does with them.

A proxy (:class:`Text`, :class:`Value`) has no content, only its symbol and its :class:`Trace`. Concatenation needs no
content. A question, such as whether a text is empty, is answered by the trace for the chat at hand and recorded as a
guard. A pure function of a text is recorded as a step. Every other operation raises :class:`UnprovenError`.

A *symbol* is a character of plane 16. No template, role, key or variable may contain one.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from jinja2 import Undefined

from asyncdata.tokenization.chat_template.programs import ADD, Pieces, Program, Step

MARKS = "".join(map(chr, range(0xFDD0, 0xFDF0)))
"""Characters that mark places in a chat while it is rendered: code points that will never be assigned."""

_FIRST_SYMBOL, _NUM_SYMBOLS = 0x100000, 0x10000
_MAX_OPERATIONS = 500_000
"""Operations of a run: seconds. Templates of known models need up to 250,000 for a chat of 100 messages."""

_SYMBOL = re.compile("[\U00100000-\U0010ffff]")
_MARK = re.compile(f"[{MARKS}]")
_SCALARS = frozenset({int, float, bool, type(None), range})

_TEXT_METHODS = frozenset(
    "strip lstrip rstrip removeprefix removesuffix replace lower upper title capitalize find rfind count".split()
)
_PIECE_METHODS = frozenset("split rsplit splitlines partition rpartition".split())
_QUESTION_METHODS = frozenset("startswith endswith isspace".split())


class UnprovenError(Exception):
    """The template uses a value of the chat in a way that needs the value itself."""


def has_symbol(text: str) -> bool:
    """Whether the text contains a symbol."""
    return not text.isascii() and _SYMBOL.search(text) is not None


def symbols_in(text: str) -> list[str]:
    """The text, split at its symbols: every second piece is a symbol."""
    return re.split(f"({_SYMBOL.pattern})", text)


def is_plain(value: Any) -> bool:
    """Whether a value is the same for every chat of the shape: no part of it is unknown."""
    kind = type(value)
    if kind is str:
        return not has_symbol(value)

    if kind is list or kind is tuple:
        return all(map(is_plain, value))

    if kind is dict:
        return all(is_plain(key) and is_plain(each) for key, each in value.items())

    return kind in _SCALARS or isinstance(value, Undefined)


class Trace:
    """The record of one run: the values of the chat by their symbols, the guards, and the steps.

    :ivar is_broken: whether an operation was refused, even if the template caught the error.
    """

    def __init__(self) -> None:
        self.is_broken = False
        self._num_operations = 0
        self._values: dict[str, Any] = {}
        self._symbols: dict[Hashable, str] = {}
        self._loads: dict[str, tuple[int | None, str]] = {}
        self._steps: list[tuple[str, Callable[[Any], Any], Any]] = []
        self._answers: dict[Hashable, Any] = {}
        self._written: set[str] = set()

    def load(self, number: int | None, key: str, value: Any) -> Text | Value | None:
        """The value of message ``number``, or the tools, for a template. Its type is known."""
        if value is None:
            return None

        symbol = self._new_symbol(value)
        self._loads[symbol] = (number, key)
        return self._of(symbol)

    def child(self, parent: str, key: int | str) -> Text | Value | None:
        """The item of a list or an object at ``key``, which is known to exist."""
        name = ("child", parent, key)
        if name not in self._symbols:
            self._add(name, parent, operator.itemgetter(key))
        symbol = self._symbols[name]
        return None if self.ask(symbol, type, "type") is type(None) else self._of(symbol)

    def derive(self, text: str, function: Callable[[Any], str | int], *name: Hashable) -> Any:
        """The result of a pure function of a text, as a proxy; recorded as a step.

        :param name: identifies the function.
        """
        if _MARK.search(text):
            self.refuse("a mark that would be hidden")
        whole = ("derived", text, *name)
        if whole not in self._symbols:
            self._add(whole, text, function)
        return self._of(self._symbols[whole])

    def ask(self, text: str, question: Callable[[Any], Any], *name: Hashable) -> Any:
        """The result of a pure function for the chat at hand; recorded as a guard.

        :param name: identifies the question.
        """
        self.count()
        whole = (text, *name)
        if whole not in self._answers:
            answer = self._answers[whole] = question(self._value(text))
            self._steps.append((text, question, answer))
        return self._answers[whole]

    def count(self) -> None:
        """Count an operation. What takes very many is rendered, which takes a fraction of the time.

        :raises UnprovenError: beyond a limit.
        """
        self._num_operations += 1
        if self._num_operations > _MAX_OPERATIONS:
            self.refuse("so many operations")

    def refuse(self, what: str) -> NoReturn:
        """:raises UnprovenError: always."""
        self.is_broken = True
        raise UnprovenError(what)

    def captured(self, text: str) -> str | Text:
        """A rendered string, as a value for the template."""
        return Text(self, text) if has_symbol(text) else text

    def note(self, text: str) -> None:
        """A complete or partial rendering."""
        self._written.update(_SYMBOL.findall(text))

    def program(self, parts: Sequence[str] | None, absent: tuple[str, ...] = ()) -> Program:
        """The program for the chats of the shape that pass the guards: their text consists of ``parts``.

        :param parts: texts with symbols; None if the chats must be rendered.
        :param absent: strings that no value may contain that was written in any rendering.
        """
        asked = "".join([text for text, _, _ in self._steps])
        used = set(_SYMBOL.findall("".join([asked, *(parts or ()), *(self._written if absent else ())])))
        loads = [symbol for symbol in self._loads if symbol in used]
        numbers = {symbol: number for number, symbol in enumerate(loads)}
        for symbol in self._values:
            if symbol not in self._loads:
                numbers[symbol] = len(numbers)
        steps = [
            Step(numbers[text] if text in numbers else _pieces(text, numbers), function, outcome)
            for text, function, outcome in self._steps
        ]
        while parts is None and steps and steps[-1].outcome is ADD:
            steps.pop()
        cut = None if parts is None else tuple(_pieces(part, numbers) for part in parts)
        return Program(tuple(self._loads[symbol] for symbol in loads), tuple(steps), cut, absent)

    def _of(self, symbol: str) -> Text | Value:
        kind = type(self._values[symbol])
        return Text(self, symbol) if kind is str else Value(self, symbol, kind)

    def _value(self, text: str) -> Any:
        if text in self._values:
            return self._values[text]

        return "".join([self._values[piece] if piece in self._values else piece for piece in symbols_in(text)])

    def _add(self, name: Hashable, text: str, function: Callable[[Any], Any]) -> None:
        self._symbols[name] = self._new_symbol(function(self._value(text)))
        self._steps.append((text, function, ADD))

    def _new_symbol(self, value: Any) -> str:
        if len(self._values) == _NUM_SYMBOLS:
            self.refuse("a chat of so many parts")
        symbol = chr(_FIRST_SYMBOL + len(self._values))
        self._values[symbol] = value
        return symbol


def _pieces(text: str, numbers: dict[str, int]) -> Pieces:
    return tuple(numbers.get(piece, piece) for piece in symbols_in(text) if piece)


class _Unknown:
    """A value of the chat. Every operation that is not defined here is refused, including those of ``object``."""

    __slots__ = ("_text", "_trace")

    def __init__(self, trace: Trace, text: str) -> None:
        self._trace = trace
        self._text = text

    @property
    def rendered(self) -> str:
        """Placeholder character for this value in rendered text."""
        return self._text

    def derive(self, function: Callable[[Any], str | int], *name: Hashable) -> Any:
        """The result of a pure function, as a proxy: a text or a number."""
        return self._trace.derive(self._text, function, *name)

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """:raises UnprovenError: always."""
        self._trace.refuse("what only a value can answer")

    def __bool__(self) -> bool:
        return bool(self._trace.ask(self._text, bool, "bool"))

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _equals(self, other: Any) -> bool:
        return bool(self._trace.ask(self._text, partial(operator.eq, other), "==", type(other).__name__, repr(other)))

    def __hash__(self) -> int:
        return self.refuse()

    __reversed__ = __str__ = __repr__ = __format__ = refuse


class Text(_Unknown):
    """A string of the chat, or a concatenation of such strings and constants."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return any(not has_symbol(char) for char in self._text) or super().__bool__()

    def __eq__(self, other: object) -> bool:
        if type(other) is str and not has_symbol(other):
            return self._equals(other)

        if isinstance(other, str | Text):
            return self._same(other)

        return False

    def __contains__(self, part: object) -> bool:
        part = self._constant(part)
        return bool(self._trace.ask(self._text, operator.methodcaller("__contains__", part), "in", part))

    def __add__(self, other: object) -> Text:
        if isinstance(other, Text):
            return Text(self._trace, self._text + other.rendered)

        if isinstance(other, str):
            return Text(self._trace, self._text + self._constant(other))

        return NotImplemented

    def __radd__(self, other: object) -> Text:
        return Text(self._trace, self._constant(other) + self._text)

    def __getitem__(self, part: Any) -> Text:
        if not isinstance(part, slice) or not is_plain([part.start, part.stop, part.step]):
            self.refuse()
        made: Text = self.derive(operator.itemgetter(part), "[]", repr(part))
        return made

    def method(self, name: str) -> Callable[..., Any]:
        """The string's method, if its result can be recorded."""
        if name in _TEXT_METHODS:
            return partial(self._made, name)

        if name in _PIECE_METHODS:
            return partial(self._parted, name)

        return partial(self._asked, name) if name in _QUESTION_METHODS else self.refuse()

    def _made(self, name: str, *args: Any) -> Any:
        return self.derive(operator.methodcaller(name, *args), name, repr(args))

    def _asked(self, name: str, *args: Any) -> Any:
        return self._trace.ask(self._text, operator.methodcaller(name, *args), name, repr(args))

    def _parted(self, name: str, *args: Any) -> list[str | Text]:
        """The pieces of the text as proxies. Their number, which the chat at hand has, is a guard."""
        part = operator.methodcaller(name, *args)
        length = self._trace.ask(self._text, lambda text: len(part(text)), name, "length", repr(args))
        if length == 1 and args and name in ("split", "rsplit"):
            return [self]  # the separator is not in it

        def piece(number: int, text: str) -> str:
            return str(part(text)[number])

        return [self.derive(partial(piece, number), name, repr(args), number) for number in range(length)]

    def _constant(self, other: object) -> str:
        return other if type(other) is str and not has_symbol(other) else self.refuse()

    def _same(self, other: Any) -> bool:
        return True if isinstance(other, Text) and other.rendered == self._text else self.refuse()

    __hash__ = _Unknown.__hash__
    __iter__ = __len__ = __lt__ = __le__ = __gt__ = __ge__ = _Unknown.refuse


class Value(_Unknown):
    """A value of the chat that is neither a string nor null.

    :ivar kind: its type.
    """

    __slots__ = ("_parts", "kind")

    def __init__(self, trace: Trace, text: str, kind: type) -> None:
        super().__init__(trace, text)
        self.kind = kind
        self._parts: Any = None

    def opened(self) -> Any:
        """The list of its items or the dict of its values; their number or keys are recorded as a question."""
        if self._parts is None:
            if self.kind is list:
                keys = range(self._trace.ask(self._text, len, "len"))
                self._parts = [self._trace.child(self._text, key) for key in keys]
            elif self.kind is dict:
                names = self._trace.ask(self._text, tuple, "keys")
                if not is_plain(names):
                    self.refuse()
                self._parts = {name: self._trace.child(self._text, name) for name in names}
            else:
                self.refuse()
        return self._parts

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Value):
            return True if other.rendered == self._text else self.refuse()

        if other is None or isinstance(other, Text):
            return False

        return self._equals(other) if is_plain(other) else bool(self.refuse())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.opened())

    def __len__(self) -> int:
        return len(self.opened())

    def __contains__(self, part: object) -> bool:
        return part in self.opened()

    def __getitem__(self, part: Any) -> Any:
        return self.opened()[part]

    __hash__ = _Unknown.__hash__
    __lt__ = __le__ = __gt__ = __ge__ = _Unknown.refuse


def stand_in(value: Any) -> Any:
    """An object of the same type, for questions about the type only."""
    if isinstance(value, Text):
        return ""

    return value.kind() if isinstance(value, Value) else value
