"""Templates are rendered as by ``transformers``, in a sandbox; programs are made of what is proven of them."""

import datetime
from collections.abc import Callable
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncdata.errors import ConfigError
from tests.support import parts
from tests.support.chat_templates import EACH, LOOKS, SPECIAL, WELL_KNOWN
from tests.unit.tokenization.trained import assistant, talk, user

CHAT = [
    {"role": "system", "content": "Be <brief> & 'kind' – \U0001f600."},
    {"role": "user", "content": "  Why?\n"},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {"at": "ü"}}}]},
    {"role": "tool", "content": "[1, 2]", "name": "look"},
    {"role": "assistant", "content": "Because.", "thinking": "Hm."},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"at": {"type": "string"}, "n": 1e400}}}]

TEMPLATES = {
    "for": "{% for m in messages %}\n  {{ m.role }}: {{ m.content }}\n{% endfor %}\n",
    "trim and lstrip": "  {% if true %}  \n  a\n  {%- endif -%}  \n\nb\n\n",
    "break and continue": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.role }}"
    "{% if m.role == 'tool' %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}|{% set x = 1 %}{% endgeneration %}"
    "{{ x is defined }}{% endfor %}",
    "generation with whitespace": "a\n  {%- generation -%}\n  b\n  {%- endgeneration %}\nc",
    "tojson": "{{ messages | tojson }}\n{{ tools | tojson(indent=2) }}{{ tools | tojson(sort_keys=true) }}"
    "{{ messages | tojson(ensure_ascii=true) }}{{ messages[0] | tojson(separators=(',', ':')) }}",
    "namespace": "{% set ns = namespace(n=0, self=2) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ ns.self }}",
    "dict": "{% set d = dict(a=1, **{'b': 2}) %}{{ d }}{{ dict.fromkeys(['a', 'b'], 3) }}{{ dict([('k', 'v')]) }}",
    "macro": "{% macro say(m, end='.') %}{{ m.role }}{{ caller() if caller }}{{ end }}{% endmacro %}"
    "{% for m in messages %}{% call say(m) %}!{% endcall %}{% endfor %}",
    "keys without a value": "{% for m in messages %}{{ 'content' in m }}{{ m.content is defined }}{{ m }}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}-{{ m.thinking }}-{{ m.keys() | list }}{% endfor %}",
    "tools and documents": "{{ tools is none }}{{ documents is defined }}{{ documents is none }}{{ tools | length }}",
    "variables": "{{ bos_token }}{{ eos_token }}{{ pad_token is defined }}{{ thinking }}{{ add_generation_prompt }}",
    "raises": "{{ messages[0].role }}{{ raise_exception('roles must alternate') }}",
    "undefined": "{{ messages[0].nothing.at_all }}",
    "adds none": "{% for m in messages %}{{ m.role + m.content }}{% endfor %}",
    "private name": "{% set ns = namespace(_x=1) %}{{ ns._x }}",
    "private name later": "{% set ns = namespace(x=1) %}{% set ns._x = 1 %}",
    "type of dict": "{{ dict.mro() }}",
    "changes the chat": "{{ messages.append(1) }}",
    "leaves the sandbox": "{{ messages.__class__.__mro__ }}",
    "huge range": "{{ range(1000000) | length }}",
    "strings": "{{ messages[0].content.upper().split(' ') | join('\\n') }}{{ 'a\\tb' }}{{ 'ab'[::-1] }}{{ '%s' % 3 }}",
}


@pytest.fixture(scope="module")
def their_tokenizer(small_tokenizer) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.23", reason="the oracle is not installed")
    return transformers.AutoTokenizer.from_pretrained(small_tokenizer, bos_token="<|endoftext|>")


def attempt(render: Callable[[], str]) -> str | None:
    try:
        return render()
    except Exception:
        return None


def both(their_tokenizer: Any, template: str, messages: Any, tools: Any = None, **kwargs: Any) -> tuple[Any, Any]:
    """What transformers renders and what we render; None for an error."""
    variables = {"add_generation_prompt": True, **their_tokenizer.special_tokens_map, **kwargs}
    ours = attempt(lambda: parts.ChatTemplate(template, variables).render(messages, tools))
    theirs = attempt(
        lambda: their_tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=template, tokenize=False, **{"add_generation_prompt": True, **kwargs}
        )
    )
    return theirs, ours


FAILING = {
    "raises", "undefined", "adds none", "private name", "private name later", "type of dict", "changes the chat",
    "leaves the sandbox", "huge range",
}  # fmt: skip


@pytest.mark.parametrize("tools", [None, [], TOOLS], ids=["no tools", "empty tools", "tools"])
def test_text_is_that_of_transformers(their_tokenizer, tools):
    kwargs = {"thinking": False, "eos_token": "<end>"}
    found = {name: both(their_tokenizer, template, CHAT, tools, **kwargs) for name, template in TEMPLATES.items()}

    assert {name: ours for name, (_, ours) in found.items()} == {name: theirs for name, (theirs, _) in found.items()}
    failing = {name for name, (_, ours) in found.items() if ours is None}
    assert failing == (FAILING | {"tools and documents"} if tools is None else FAILING)


def test_a_template_is_compiled_without_running_any_of_it():
    constants = [
        "'z' * 4", "'zz' + 'zz'", "'zz' ~ 'zz'", "'%s%s' % ('zz', 'zz')", "'ZZZZ' | lower", "['ZZZZ' | lower][0]",
    ]  # fmt: skip
    for template in ("{{ $ }}", "{% set x = $ %}{{ x }}", "{% if $ %}{{ ($) if $ else 1 }}{% endif %}"):
        for source in (template.replace("$", constant) for constant in constants):
            assert "zzzz" not in str(parts.make_environment(ImmutableSandboxedEnvironment).compile(source, raw=True))
            assert parts.ChatTemplate(source, {}).render([]) == "zzzz"
    for expression in ("1 + 1", "9 ** (9 ** 9)"):  # the first one fails at once, where the second would hang
        with pytest.raises(ConfigError, match="AD411 .* line 1 is not valid Jinja: autoescape must be true or false"):
            parts.ChatTemplate(f"{{% autoescape {expression} %}}{{% endautoescape %}}", {})
    assert parts.ChatTemplate("{% autoescape true %}{{ '<' }}{% endautoescape %}", {}).render([]) == "&lt;"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ " + "(" * 5000 + " }}", ""),
        ("{% for a in [] %}" * 120 + "{% endfor %}" * 120, ""),
        ("{{ m }}" * 6001, " has more than 30,000 names, operators, texts and blanks"),
        (" " * 1_000_001, " has 1,000,001 characters; at most 1,000,000"),
    ],
    ids=["brackets", "loops", "tokens", "characters"],
)
def test_a_template_that_would_take_long_to_compile_is_refused_with_the_limit(text, reason):
    with pytest.raises(ConfigError, match=f"AD411 the chat template{reason}"):
        parts.ChatTemplate(text, {})


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("\n\n{{ raise_exception('roles must alternate') }}", "chat template line 3: roles must alternate"),
        (
            "a\n{% for m in messages %}\n{{ m.role + 1 }}\n{% endfor %}",
            "chat template line 3: TypeError: can only concat",
        ),
        ("{{ x.y.z }}", "chat template line 1: UndefinedError: 'x' is undefined"),
        ("{% macro f() %}\n{{ 1 / 0 }}\n{% endmacro %}\n\n{{ f() }}", "chat template line 2: ZeroDivisionError"),
        ("\n{% generation %}\n{{ 1 / 0 }}{% endgeneration %}", "chat template line 3: ZeroDivisionError"),
    ],
    ids=["raises", "adds", "undefined", "in a macro", "in a block"],
)
def test_a_templates_error_names_its_line(template, reason):
    with pytest.raises(parts.RowFault) as caught:
        parts.ChatTemplate(template, {}).render([{"role": "user"}])

    assert caught.value.code == "AD412"
    assert caught.value.reason.startswith(reason)


def test_a_template_that_is_no_jinja_is_refused_at_once():
    for template in ("{% if %}", "a\n{% generation %}", "{{ 'x }}", "{% nothing %}", "{{ x | nothing }}"):
        with pytest.raises(ConfigError, match=f"line {template.count(chr(10)) + 1} is not valid Jinja"):
            parts.ChatTemplate(template, {})


def test_messages_are_left_as_they_were_and_a_template_is_told_the_date_that_was_given_and_never_sees_the_clock():
    message, today = {"role": "user", "content": None, "reasoning": "x"}, datetime.datetime(2024, 7, 26)
    asks = "{{ strftime_now('%d %b %Y') }}"

    assert (
        parts.ChatTemplate("{{ messages }}{{ strftime_now(format='%Y') }}", {}, today).render([message])[-4:] == "2024"
    )
    assert message == {"role": "user", "content": None, "reasoning": "x"}
    assert parts.ChatTemplate(asks, {}, today).render([]) == "26 Jul 2024"
    with pytest.raises(ConfigError, match="today="):
        parts.ChatTemplate(asks, {})
    with pytest.raises(parts.RowFault, match="today="):
        parts.ChatTemplate(asks, {"date_string": "26 Jul 2024"}).render([])


@pytest.mark.parametrize(
    ("templates", "name", "chosen"),
    [
        ("D", None, ("D", "D")), ("DTR", None, ("D", "T")), ("DTR", "rag", ("R", "R")), ("DTR", "default", ("D", "D")),
        ("DTR", "{{ messages }}", ("{{ messages }}", "{{ messages }}")),
        ("", "{{ messages }}", ("{{ messages }}", "{{ messages }}")),
        ("", None, "AD411 .* 'default': it has none. Pass the text of a chat_template, .* that has one$"),
        ("TR", None, "AD411 .* 'default': its templates are rag, tool_use"),
        ("TD", "tooluse", "AD411 .* 'tooluse': its templates are default, tool_use"),
    ],
)  # fmt: skip
def test_a_template_is_chosen_as_transformers_does_and_one_that_is_not_there_is_refused(templates, name, chosen):
    given = {{"D": "default", "T": "tool_use", "R": "rag"}[letter]: letter for letter in templates}
    if isinstance(chosen, str):
        with pytest.raises(ConfigError, match=chosen):
            parts.choose_templates(given, name)
    else:
        assert parts.choose_templates(given, name) == chosen


VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
CALL = {"id": "1", "function": {"name": "look", "arguments": {"at": "x", "n": [1, None, True]}}}
TOOLS_OF_PROGRAMS = [{"type": "function", "function": {"name": "look"}}]


def prove(text: str, messages: list[dict[str, Any]], tools: Any = None, **variables: Any) -> parts.Program:
    template = parts.ChatTemplate(text, {**VARIABLES, **variables}, datetime.datetime(2026, 1, 31))
    return template.proven(messages, tools, lambda one: ([one.rendered(one.messages, one.tools)], ()))


def made(program: parts.Program, messages: list[dict[str, Any]], tools: Any = None) -> list[str] | None:
    """The program's text; None for a chat for which it does not hold."""
    values = program.values(messages, tools)
    return None if values is None else program.texts(values)


def rendered(text: str, messages: list[dict[str, Any]], tools: Any = None) -> list[str]:
    return [parts.ChatTemplate(text, VARIABLES).rendered(messages, tools)]


@pytest.mark.parametrize("name", ["chatml with tools", "thinks", "macro"])
def test_templates_of_well_known_kinds_are_proven_for_calls_of_tools(name):
    called = [*talk("a", ""), {"role": "tool", "content": "b"}, {"role": "assistant", "content": "c"}]
    called[1] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    other = [{**called[0], "content": "Look."}, {**called[1], "tool_calls": [{**CALL, "id": "2"}]}, *called[2:]]
    other[1]["tool_calls"][0]["function"] = {"name": "see", "arguments": {"y": "é"}}
    program = prove(WELL_KNOWN[name], called, TOOLS_OF_PROGRAMS)

    assert made(program, other, [{"x": 1}]) == rendered(WELL_KNOWN[name], other, [{"x": 1}])


@pytest.mark.parametrize("what", LOOKS, ids=range(len(LOOKS)))
def test_a_template_that_looks_into_a_text_or_may_not_say_the_same_twice_is_not_proven(what):
    text = EACH.replace("WHAT", what)
    rendered(text, talk("a", "b"))  # it is fine, only not proven

    assert prove(text, talk("a", "b")).parts is None


def test_a_chat_that_the_template_refuses_is_not_proven_and_says_nothing_of_others():
    text = "{% if messages[0].content == 'a' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    refused, fine = prove(text, talk("a")), prove(text, talk("b"))

    assert refused.parts is None
    assert refused.values(talk("b"), None) is None
    assert made(fine, talk("c")) == ["c"]
    assert made(fine, talk("a")) is None


def test_a_proof_that_takes_very_many_operations_is_given_up(monkeypatch):
    parts.change(monkeypatch, most_operations=100)
    template = parts.ChatTemplate(
        "{% for a in messages %}{% for b in messages %}{{ a.content }}{% endfor %}{% endfor %}", {}
    )
    short, long = ([{"role": "user", "content": text}] * number for text, number in (("a", 2), ("b", 20)))
    programs = [
        template.proven(chat, None, lambda each: ([each.rendered(each.messages)], ())) for chat in (short, long)
    ]

    assert [program.parts is not None for program in programs] == [True, False]
    assert [template.render(long) for _ in range(3)] == ["b" * 400] * 3


@pytest.mark.parametrize(
    ("calls", "holds"),
    [
        ([{"id": "", "function": {"name": "b", "arguments": {}}}], True), ([CALL, CALL], False), ([], False),
        ([{"name": "b"}], False), ([{**CALL, "function": {"name": "b"}}], False),
        ([{**CALL, "function": {"name": None, "arguments": {}}}], False), ([None], False),
    ],
)  # fmt: skip
def test_a_program_holds_for_as_many_calls_with_the_same_keys_and_types(calls, holds):
    program = prove(WELL_KNOWN["chatml with tools"], [assistant("a", tool_calls=[CALL])])

    assert (made(program, [assistant("a", tool_calls=calls)]) is not None) is holds


def test_a_message_that_begins_after_text_of_another_message_is_not_proven():
    text = "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>' }}"
    text += "{{ BEFORE if BEFORE.startswith('x') else 'yy' }}{{ m.content + '<|im_end|>' }}"
    text += "{{ '.' if loop.last }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    text += "{{ '<|im_start|>' if add_generation_prompt }}"
    text = text.replace("BEFORE", "messages[loop.index0 - 1].content")
    template = parts.ChatTemplate(text, {**VARIABLES, "add_generation_prompt": False})

    assert parts.ChatSpans(template, "it", SPECIAL, "</s>").proven(talk("x", "b", "c"), None, [1]).parts is None


def test_the_date_that_a_template_is_told_is_a_constant():
    program = prove("{{ strftime_now('%d %b %Y') }}{{ messages[0].content }}", talk("a"))

    assert made(program, talk("b")) == ["31 Jan 2026b"]


# Texts with the characters that stand for texts and for the borders of blocks


NAMES = "{{ messages[0].role }}{{ messages[0].keys() | list }}{{ bos_token + messages[0].content }}"
LISTS = "{{ messages[0].parts == [messages[0].content] }}"
MARKED = "{{ (messages[0].content ~ 'x') | upper }}"
PROVEN: dict[str, tuple[str, list[dict[str, Any]], dict[str, Any], bool]] = {
    "nothing odd": (NAMES, talk("a"), {}, True),
    "a variable": (NAMES, talk("a"), {"bos_token": "\U00100000"}, False),
    "a role": (NAMES, [{"role": "\U00100000", "content": "a"}], {}, False),
    "a key": (NAMES, [user("a") | {"\U00100000": 1}], {}, False),
    "a list beside one with an unknown text in it": (LISTS, [user("a") | {"parts": ["a"]}], {}, False),
    "a text": (MARKED, talk("a"), {}, True),
    "a mark in a text, which would be hidden in it": (MARKED.replace("x", "\ufdd0"), talk("a"), {}, False),
    **{
        f"a role that looks like a text, {what}, {role!r}": (
            "{% for message in messages %}{{ " + what + " }}{% endfor %}",
            [{"role": role, "content": ""}, {"role": role, "content": role}], {}, False,
        )
        for what in ["message.role in messages[0].content", "message.content == message.role", "message"]
        for role in ["\U00100000", "a\U00100001"]
    },
}  # fmt: skip


@pytest.mark.parametrize(("text", "messages", "variables", "is_proven"), PROVEN.values(), ids=PROVEN)
def test_what_could_be_taken_for_a_text_is_not_proven(text, messages, variables, is_proven):
    program = prove(text, messages, **variables)

    assert (program.parts is not None) is is_proven
    assert made(program, messages) in (None, rendered(text, messages))


class Prover:
    """Says that a text is the first content in brackets, for contents of the same length; notes what it is asked."""

    def __init__(self, *, proves: bool = True) -> None:
        self.asked: list[tuple[list[dict[str, Any]], Any, Any]] = []
        self.proves = proves

    def __call__(self, messages: list[dict[str, Any]], tools: Any, more: Any) -> parts.Program:
        self.asked.append((messages, tools, more))
        steps = [parts.Step(0, len, len(messages[0]["content"]))]
        return parts.Program([(0, "content")], steps, [("[", 0, "]")] if self.proves else None)


@pytest.fixture
def prover() -> Prover:
    return Prover()


def test_a_shape_is_proven_when_it_comes_for_the_second_time_and_is_of_roles_keys_and_types(prover):
    shapes = parts.Shapes(prover)

    assert [shapes.texts([user(text)], None) for text in "abc"] == [None, ["[b]"], ["[c]"]]
    others: list[tuple[Any, Any, Any]] = [
        ([user("a"), user("b")], None, None), ([{"role": "system", "content": "a"}], None, None),
        ([user("a", name="x")], None, None), ([{"content": "a", "role": "user"}], None, None),
        ([{"role": "user", "content": ["a"]}], None, None), ([{"role": "user", "content": None}], None, None),
        ([user("a")], [], None), ([user("a")], None, (1,)),
        *(([user("a", loss=value)], None, None) for value in (1, True, 1.0)),
    ]  # fmt: skip
    assert [shapes.texts(*other) for other in others] == [None] * len(others)
    assert prover.asked == [([user("b")], None, None)]


def test_as_many_shapes_are_kept_as_came_lately(prover):
    shapes = parts.Shapes(prover)
    often = [user("a", often=1)]
    for number in range(2000):
        shapes.texts([user("a", **{str(number): 1})], None)
        shapes.texts(often, None)

    assert (len(prover.asked), shapes.texts([user("a", **{"1999": 1})], None)) == (1, ["[a]"])
    assert shapes.texts([user("a", **{"0": 1})], None) is None


@pytest.mark.parametrize(
    "messages",
    [[user("a")] * 129, [{"role": ["user"], "content": "a"}], [{"role": 1, "content": "a"}], [{"content": "a"}]],
    ids=["too many", "list", "number", "none"],
)
def test_chats_that_are_too_long_or_have_odd_roles_are_rendered(prover, messages):
    shapes = parts.Shapes(prover)

    assert ([shapes.texts(messages, None) for _ in range(3)], prover.asked) == ([None, None, None], [])


def test_a_value_that_is_too_deep_to_be_made_into_text_is_rendered():
    deep: Any = "a"
    for _ in range(100_000):
        deep = [deep]
    program = parts.Program([(0, "content")], [parts.Step(0, repr, parts.ADD)], [(1,)])

    assert program.values([{"role": "user", "content": deep}], None) is None
    while isinstance(deep, list):  # or Python would take it apart recursively
        deep = deep.pop()


def test_a_program_that_comes_to_another_text_than_the_template_is_not_used():
    program = parts.Program([(0, "content")], [], [("a", 0)])

    assert program.checked([user("b")], None, lambda: ["ab"]) is program
    assert program.checked([user("b")], None, lambda: ["ac"]).parts is None
    assert parts.NOTHING_PROVEN.checked([user("b")], None, lambda: ["ac"]) is parts.NOTHING_PROVEN


def test_a_template_is_not_run_for_a_shape_that_is_known_and_is_run_where_nothing_is_proven(monkeypatch):
    proven = parts.ChatTemplate("<{{ messages[0].content }}>", {})
    unproven = parts.ChatTemplate("{{ messages[0].content[0] }}{% block x %}{% endblock %}", {})

    assert [proven.render([user(text)]) for text in "ab"] == ["<a>", "<b>"]
    monkeypatch.setattr(proven, "rendered", None)
    assert proven.render([user("c")]) == "<c>"
    assert [unproven.render([user(text)]) for text in ("ab", "bc", "cd", "de")] == ["a", "b", "c", "d"]
