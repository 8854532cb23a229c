"""Chats, and templates that are hard to read."""

import json
from typing import Any

from tests.unit.tokenization.trained import assistant, user

END = "<|im_end|>"

CHAT = [
    {"role": "system", "content": "Be brief."},
    user("Why?"),
    assistant("Because."),
    user("And then?"),
    assistant("Nothing."),
]

GENERATION = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"""


def said(message: dict[str, Any]) -> str:
    text = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        text += f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": {arguments}}}\n</tool_call>'
    return text + END
