"""Chat templates in the manner of well-known models, written for these tests; and small ones that try one thing."""

SPECIAL = (
    "<|im_start|> <|im_end|> <|begin|> <|head|> <|/head|> <|eot|> <s> </s> [INST] [/INST] <start_of_turn> "
    "<end_of_turn> <|User|> <|Assistant|> <|end|>"
).split()


# A default system message, parts of a content, tools as JSON.
CHATML_WITH_TOOLS = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'Be helpful.' }}{%- endif %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' ~ messages[0].content ~ '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ['user', 'system'] and not (message.role == 'system' and loop.first)
        or message.role == 'assistant' and not message.tool_calls %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# The thinking of all turns but those behind the last question is dropped; what is written may have it in the content.
THINKS = """\
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' and message.content is string
        and not (message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and (loop.last or (not loop.last and reasoning)) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') }}
            {{- '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Trims, and puts the first token before the first message.
HEADERS = """\
{% set loop_messages = messages %}{% for message in loop_messages %}
{%- set content = '<|head|>' + message['role'] + '<|/head|>\\n\\n' + message['content'] | trim + '<|eot|>' %}
{%- if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}
{{- content }}{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\\n\\n' }}{% endif %}"""

# Turns must alternate; the system message goes into the first turn.
INSTRUCTS = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system_message is defined %}
            {{- '[INST] ' + system_message + '\\n\\n' + message['content'] + ' [/INST]' }}
        {%- else %}{{- '[INST] ' + message['content'] + ' [/INST]' }}{%- endif %}
    {%- elif message['role'] == 'assistant' %}{{- ' ' + message['content'] + eos_token }}
    {%- else %}{{- raise_exception('only user and assistant roles') }}{%- endif %}
{%- endfor %}"""

# A macro for contents that are text or parts, blocks of its own.
MACRO = """\
{%- macro text_of(content) -%}
    {%- if content is string -%}{{- content -}}
    {%- elif content is not none and content is defined -%}
        {%- for part in content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- for message in messages -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' -}}
    {%- if message.role == 'assistant' -%}
        {%- generation -%}
        {{- text_of(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set fn = call.function if call.function is defined else call -%}
            {{- '<tool_call>' + fn.name + ' ' -}}
            {%- if fn.arguments is string -%}{{- fn.arguments -}}{%- else -%}{{- fn.arguments | tojson -}}{%- endif -%}
        {%- endfor -%}
        {{- '<|im_end|>' -}}
        {%- endgeneration -%}
        {{- '\\n' -}}
    {%- else -%}{{- text_of(message.content) + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""

WELL_KNOWN = {"chatml with tools": CHATML_WITH_TOOLS, "thinks": THINKS, "headers": HEADERS}
WELL_KNOWN |= {"instructs": INSTRUCTS, "macro": MACRO}


def plain(template: str) -> str:
    """The template without its ``{% generation %}`` marks."""
    return template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")


EACH = "{% for m in messages %}WHAT{% endfor %}"
CALLS_A_MACRO = """\
{% macro f(a, b='-') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}{{ f(m.content) | trim }}
{%- call f(m.content, b=m.role) %}{{ m.content }}{% endcall %}{{ f(b=f('x', m.content)) ~ '.' }}"""
OPENS_ARGUMENTS = """\
{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{{ call.name is defined }}
{%- for k, v in call.function.arguments | items %}{{ k }}{{ v }}{{ v is string }}{% endfor %}{% endfor %}"""
ASKS_ARGUMENTS = """\
{% for call in m.tool_calls or [] %}{% set a = call.function.arguments %}{{ 'x' in a }}{{ a.get('x', '-') }}
{{- a | length }}{{ a is mapping }}{{ a == {} }}{% endfor %}"""
LOOKS = (
    "{{ m.content[0] }}", "{{ m.content | first }}", "{{ m.content | list }}", "{{ m.content | reverse }}",
    "{{ m.content | int }}", "{{ m.content | e }}", "{{ m.content | wordcount }}", "{{ m.content | random }}",
    "{{ 'abc' | random }}", "{{ m.content == messages[-1].content }}", "{{ m.content < 'b' }}",
    "{{ m.content in 'abc' }}", "{{ m.content in messages[-1].content }}",
    "{{ m.content.startswith(messages[-1].content) }}", "{{ m.content * 2 }}", "{{ '%s' % m.content }}",
    "{{ '{}'.format(m.content) }}", "{{ 'a'.join([m.content]) }}", "{{ [m.content] }}",
    "{{ {m.content: 1} | length }}", "{{ {'a': 1}[m.content] is defined }}", "{{ messages[m.content] is defined }}",
    "{{ m }}", "{{ m | tojson }}", "{{ m.content.upper }}", "{{ m.content.upper.func }}", "{{ m.content is upper }}",
    "{{ m.content is sameas m.content }}", "{{ '_shown' is filter }}",
    "{% for char in m.content %}{{ char }}{% endfor %}", "{% filter upper %}{{ m.content }}{% endfilter %}",
    "{% block x scoped %}{{ m.content }}{% endblock %}", "{{ ('<' | safe) + m.content }}",
    "{{ ['b', m.content] | sort | join }}", "{{ lipsum(1) | length > 0 }}", "{{ joiner('-')() }}",
    "{{ range(m.content | length) | list }}", "{{ '\\U00100000' }}", "\U00100000{{ m.content }}", "{{ namespace }}",
)  # fmt: skip
"""Each looks into a text, or may not say the same twice."""
SHOWN = (
    "{{ m.content | trim }}", "{{ m.content | trim('a') ~ 1 ~ none ~ true }}",
    "{{ m.content | upper }}{{ m.content.title() }}",
    "{{ m.content | replace('a', 'b') }}{{ m.content.replace('a', '') }}", "{{ m.content[1:-1] }}{{ m.content[::-1] }}",
    "{{ m.content | length }}", "{{ 'long' if m.content | length > 2 else 'short' }}",
    "{{ m.content | string | trim }}",
    "{{ m.content | default('x') }}{{ m.nothing | default(m.content) }}{{ m.content | default('y', true) }}",
    "{{ m.content == '' }}{{ m.content == 'a' }}{{ 'a' != m.content }}{{ m.content in ['a', 'b', ''] }}",
    "{{ m.content == m.role }}{{ m.content == 5 }}{{ m.content == nothing }}", "{{ 'a' in m.content }}",
    "{{ m.role in m.content }}",
    "{{ m.content.startswith('a') }}{{ m.content.endswith(('a', 'b')) }}{{ m.content.isspace() }}",
    "{{ m.content.split('a') | length }}{{ m.content.split('a')[-1] }}{{ m.content.split('b')[0] }}",
    "{{ m.content.split() | join('-') }}{{ m.content.partition('a')[2] }}{{ m.content.splitlines() | last }}",
    "{{ m.content.find('a') }}{{ m.content.find('b') >= 0 }}{{ m.content.count('a') == 1 }}{{ m.content.index('a') }}",
    "{{ m.content and 'yes' or 'no' }}{{ not m.content }}{{ (m.content + 'x') and 1 }}",
    "{{ m.content or 'nothing' }}{{ (m.content ~ m.content) | trim }}", "{{ '%s!' | format(m.content) }}",
    "{{ [m.content, m.role] | join(', ') }}",
    "{{ {'a': m.content}['a'] }}{{ {'a': m.content}.get('a') }}{{ dict(a=m.content).a }}",
    "{{ m.content | tojson }}{{ m.tool_calls | tojson(indent=2) }}", "{{ m.content | urlencode }}",
    "{{ m.content | indent(2) }}{{ m.content | indent(2, true) }}",
    "{{ m.content is string }}{{ m.content is none }}{{ m.content is mapping }}{{ m.content is iterable }}",
    "{{ m.content is number }}{{ m.content is sequence }}{{ m.content is boolean }}{{ m.content is defined }}",
    "{{ m.content is eq 'a' }}{{ m.content is in ['a'] }}{{ m.content is ne messages[0].role }}",
    "{{ m.content.foo }}{{ m.content['bar'] }}{{ m.content.__class__ }}",
    "{{ m.items() | list | length }}{{ m.keys() | list }}{{ m.values() | list | last }}{{ m.get('content') }}",
    "{{ 'content' in m }}{{ 'tool_calls' in m }}{{ m == messages[0] }}",
    "{% for key, value in m.items() %}{{ key }}={{ value }};{% endfor %}", "{% for key in m %}{{ m[key] }}{% endfor %}",
    "{% for part in m.content.split('a') %}{{ loop.index }}{{ part }}{% else %}none{% endfor %}",
    "{% set x %}{{ m.content }}{% endset %}{{ x }}{{ x | trim }}{{ x == 'a' }}",
    "{% set x | trim %} {{ m.content }} {% endset %}[{{ x }}]", CALLS_A_MACRO,
    "{% set ns = namespace(x=m.content, y='') %}{% set ns.y = ns.x + ns.y %}{{ ns.y }}",
    "{% with a = m.content %}{{ a }}{% endwith %}",
    "{% if loop.previtem is defined %}{{ loop.previtem.content }}{% endif %}{{ loop.nextitem.role }}",
    "{{ loop.changed(m.content) }}", "{{ loop.cycle('a', m.content) }}",
    "{% if m.content %}{% continue %}{% endif %}{{ m.role }}{% break %}",
    "{% generation %}{{ m.content }}{% endgeneration %}!",
    "{% generation %}{{ m.content }}{% endgeneration %}{{ m.content | trim }}",
    "{% set x %}{% generation %} {{ m.content }} {% endgeneration %}{% endset %}{{ x }}",
    "{% set x %}{% generation %} {{ m.content }} {% endgeneration %}{% endset %}{{ x | trim }}",
    "{{ m.tool_calls | length }}{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0]['function'].arguments }}",
    OPENS_ARGUMENTS, ASKS_ARGUMENTS,
    "{% if m.tool_calls %}{{ m.tool_calls | map(attribute='function') | map(attribute='name') | join }}{% endif %}",
    "{{ m.tool_calls == [] }}{{ m.tool_calls is iterable }}{{ m.tool_calls + [] }}",
    "{{ m.flag }}{{ 'x' if m.flag }}{{ m.flag == 1 }}{{ m.flag is boolean }}{{ m.flag is number }}",
    "{{ m.flag is true }}", "{{ m.number }}{{ m.number + 1 }}",
    "{{ m.number > 1 }}{{ m.number == 1 }}{{ m.number == true }}{{ m.number is integer }}{{ m.number | tojson }}",
    "{{ m.number | string | length }}{{ m.number ~ '' }}", "{{ '\ufdd0' ~ m.content }}",
    "{{ m.reasoning_content }}{{ m.thinking }}", "{{ cycler('a', 'b').next() }}",
    "{{ ['b', m.content] | unique | list | length }}",
    "{% raw %}{{ m }}{% endraw %}{{ m.role | upper }}{{ 7 // 2 }}{{ -1 }}{{ 1.5 }}",
)  # fmt: skip
WHOLE = (
    "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join('+') }}",
    "{{ messages | rejectattr('content') | list | length }}{{ messages | map(attribute='role') | list }}",
    "{{ (messages | last).content }}{{ (messages | first)['content'] }}{{ messages[-1:][0].content }}",
    "{{ messages | map(attribute='content') | map('trim') | list | last }}",
    "{{ messages | selectattr('content', 'in', ['a', 'b']) | list | length }}",
    "{{ messages | groupby('role') | length }}{{ messages | length }}", "{{ messages }}{{ messages | tojson }}",
    "{{ messages[0].content + messages[-1].content }}{{ messages | reverse | map(attribute='content') | first }}",
    "{{ tools | tojson }}{% for tool in tools or [] %}{{ tool | tojson }}{{ tool.name }}{% endfor %}",
    "{{ tools | length }}",
    "{{ tools is none }}{{ tools is iterable }}{{ 'x' if tools }}{{ tools[0].name }}{{ tools }}",
    "{{ bos_token + messages[0].content }}{{ nothing + messages[0].content }}", "{{ messages[0].content + nothing }}",
    "{{ messages[0].content + 1 }}", "{{ messages[0].content(1) }}", "{{ messages[9].content }}",
    "{{ raise_exception(messages[0].content) }}",
    "{{ 'a' if messages[0].content == 'a' else raise_exception('not a') }}",
    "{% set x = messages[0].content %}{% for m in messages %}{% set x = x + m.content %}{% endfor %}{{ x }}",
    "{% block body %}{{ messages[0].content }}{% endblock %}{{ self.body() }}",
    "{{ messages[0].content.strip().split('a')[0].strip().split('b')[-1] }}",
    "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "{{ lipsum }}{{ messages.count(messages[0]) }}{{ messages.index(messages[0]) }}",
)  # fmt: skip
ODD = (*(EACH.replace("WHAT", what) for what in (*SHOWN, *LOOKS)), *WHOLE)
"""Each tries something with what the messages hold; some fail for some chats, or for all."""
