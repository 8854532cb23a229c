"""Chats to text: the template in a sandbox, where the assistant speaks in it, and a compiled form for common shapes.

The compiled form are programs: what a template makes of all chats of one shape, found once and proven.

The method is *concolic execution*: the template runs on a real chat whose values are hidden behind proxies.

1. The *shape* of a chat is the number of its messages, their roles and keys, the types of their values, and whether
   there are tools. ``programs.Shapes`` keeps the programs of the recent shapes, and starts a run when a shape recurs.
2. For a run, each value of the chat becomes a proxy that holds no content: a ``Text`` or a ``Value``
   (``symbolic_values``). In the rendered text it is one character of plane 16, its *symbol*.
3. ``symbolic_template`` compiles the template by Jinja, after a check that its syntax tree has known statements only,
   and after a rewrite that passes every value that is written, joined or captured to the proxies.
4. A proxy can be written, and joined with constants. That needs no content.
5. If the template asks something, as ``'</think>' in content`` does, the answer of the chat at hand is used, and is
   recorded as a *guard*: the program holds only for chats with the same answer.
6. If the template applies a pure function, as ``content | trim`` does, the result is a new proxy, and the call is
   recorded as a *step*, which is repeated for each chat.
7. Every other operation raises ``UnprovenError``: chats of this shape are rendered by Jinja. No operation can reach the
   content unnoticed, because the proxy does not have it. This is why the result is a proof and not a guess.
8. The result is a ``programs.Program``: which values to load, the steps and guards in their order, and the text in
   pieces, constants and values.
9. To find the assistant's messages, the rules of ``assistant_spans`` compare such symbolic renderings;
   ``conversation.UnknownTexts`` answers their questions if the answer is the same for every chat, or records a guard.
10. The first text of each program is compared with Jinja's, which would show a change in a later release of Jinja.

A rendering with placeholders cannot replace this: a template that looks into a text does so silently.
"""
