"""Templates are rendered as by ``transformers``, in a sandbox, and never see the clock."""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from asyncdata.errors import ConfigError
from tests.support.parts import ChatTemplate, RowFault, choose_templates, make_environment

if TYPE_CHECKING:
    from collections.abc import Callable

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
    ours = attempt(lambda: ChatTemplate(template, variables).render(messages, tools))
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
        "'z' * 4",
        "'zz' + 'zz'",
        "'zz' ~ 'zz'",
        "'%s%s' % ('zz', 'zz')",
        "'ZZZZ' | lower",
        "['ZZZZ' | lower][0]",
    ]
    for template in ("{{ $ }}", "{% set x = $ %}{{ x }}", "{% if $ %}{{ ($) if $ else 1 }}{% endif %}"):
        for source in (template.replace("$", constant) for constant in constants):
            assert "zzzz" not in str(make_environment(ImmutableSandboxedEnvironment).compile(source, raw=True))
            assert ChatTemplate(source, {}).render([]) == "zzzz"
    for expression in ("1 + 1", "9 ** (9 ** 9)"):  # the first one fails at once, where the second would hang
        with pytest.raises(ConfigError, match="AD411 .* line 1 is not valid Jinja: autoescape must be true or false"):
            ChatTemplate(f"{{% autoescape {expression} %}}{{% endautoescape %}}", {})
    assert ChatTemplate("{% autoescape true %}{{ '<' }}{% endautoescape %}", {}).render([]) == "&lt;"


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
        ChatTemplate(text, {})


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
    with pytest.raises(RowFault) as caught:
        ChatTemplate(template, {}).render([{"role": "user"}])

    assert caught.value.code == "AD412"
    assert caught.value.reason.startswith(reason)


def test_a_template_that_is_no_jinja_is_refused_at_once():
    for template in ("{% if %}", "a\n{% generation %}", "{{ 'x }}", "{% nothing %}", "{{ x | nothing }}"):
        with pytest.raises(ConfigError, match=f"line {template.count(chr(10)) + 1} is not valid Jinja"):
            ChatTemplate(template, {})


def test_messages_are_left_as_they_were_and_a_template_is_told_the_date_that_was_given_and_never_sees_the_clock():
    message, today = {"role": "user", "content": None, "reasoning": "x"}, datetime.datetime(2024, 7, 26)
    asks = "{{ strftime_now('%d %b %Y') }}"

    assert ChatTemplate("{{ messages }}{{ strftime_now(format='%Y') }}", {}, today).render([message])[-4:] == "2024"
    assert message == {"role": "user", "content": None, "reasoning": "x"}
    assert ChatTemplate(asks, {}, today).render([]) == "26 Jul 2024"
    with pytest.raises(ConfigError, match="today="):
        ChatTemplate(asks, {})
    with pytest.raises(RowFault, match="today="):
        ChatTemplate(asks, {"date_string": "26 Jul 2024"}).render([])


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
            choose_templates(given, name)
    else:
        assert choose_templates(given, name) == chosen
