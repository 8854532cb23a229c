"""Rows in the shapes of public data sets, with invented texts: what the page ``public-data-sets.md`` is tested with."""

from __future__ import annotations

import json
from typing import Any

__all__ = ("PUBLIC_ROWS",)

Row = dict[str, Any]


def _messages(*texts: str, **more: Any) -> list[Row]:
    return [{"role": ("user", "assistant")[number % 2], "content": text, **more} for number, text in enumerate(texts)]


def _turns(*texts: str, names: tuple[str, str] = ("human", "gpt"), **more: Any) -> list[Row]:
    return [{"from": names[number % 2], "value": text, **more} for number, text in enumerate(texts)]


_SYSTEM = {"role": "system", "content": "Be terse."}
_OPEN = ("user", "assistant")
_SEAS = ("Which sea lies north of Turkey?", "The Black Sea.", "And south?", "The Mediterranean.")
_SUM = ("What is 2 + 3?", "<think>2 and 3 are 5.</think>5")
_TOOL = {"name": "tide", "description": "The tide of a port.", "parameters": {"port": {"type": "str"}}}
_CALL = {"name": "tide", "arguments": {"port": "Brest"}}
_WRITTEN_CALL = f"<tool_call>\n{json.dumps(_CALL)}\n</tool_call>"
_WILD = {"country": "France", "language": "French", "redacted": False, "toxic": False, "turn_identifier": 7}
_PAIR = {"chosen": _messages(_SEAS[0], "The Black Sea."), "rejected": _messages(_SEAS[0], "The Red Sea.")}
_VERL: Row = {
    "data_source": "invented",
    "prompt": _messages(_SUM[0]),
    "ability": "math",
    "reward_model": {"ground_truth": "5", "style": "rule"},
    "extra_info": {"index": "r1"},
}

PUBLIC_ROWS: dict[str, list[Row]] = {
    "ultrachat_200k": [{"prompt": _SEAS[0], "prompt_id": "a1", "messages": _messages(*_SEAS)}],
    "no_robots": [
        {"prompt": "Hello.", "prompt_id": "b1", "category": "Chat", "messages": [_SYSTEM, *_messages("Hello.", "Hi.")]}
    ],
    "tulu-3-sft-mixture": [{"id": "c1", "messages": _messages(*_SEAS), "source": "invented"}],
    "OpenThoughts-114k": [
        {"system": "Think first.", "conversations": _turns(_SUM[0], "<|begin_of_thought|>Add.", names=_OPEN)}
    ],
    "OpenThoughts3-1.2M": [
        {"difficulty": 7, "source": "invented", "domain": "math", "conversations": _turns(*_SUM)},
        {"difficulty": None, "source": "invented", "domain": "science", "conversations": _turns(*_SEAS[:2])},
    ],
    "NuminaMath-CoT": [
        {"source": "invented", "problem": "2 + 3?", "solution": "It is 5.", "messages": _messages("2 + 3?", "It is 5.")}
    ],
    "OpenR1-Math-220k": [
        {
            "problem": "2 + 3?",
            "solution": "Count on from 2.",
            "answer": "5",
            "problem_type": "Algebra",
            "question_type": "math-word-problem",
            "source": "invented",
            "uuid": "d1",
            "is_reasoning_complete": [True, False],
            "generations": ["<think>Add.</think>5", "<think>Hm"],
            "correctness_math_verify": [True, False],
            "messages": _messages("2 + 3?", "<think>Add.</think>5"),
        }
    ],
    "AM-DeepSeek-R1-Distilled": [
        {
            "messages": [
                {"role": "user", "content": _SUM[0], "info": {"source": "invented", "reference_answer": "5"}},
                {"role": "assistant", "content": _SUM[1], "info": {"think_content": "Add.", "answer_content": "5"}},
            ]
        }
    ],
    "Nemotron-Post-Training-v1": [
        {
            "uuid": "e1",
            "license": "cc-by-4.0",
            "generator": "invented",
            "version": "1.0.0",
            "category": "math",
            "reasoning": "on",
            "messages": _messages(*_SUM, tool_calls=[]),
            "metadata": '{"expected_answer": "5"}',
        }
    ],
    "Nemotron-Chat-v3": [
        {
            "messages": [_SYSTEM, *_messages(*_SEAS)],
            "used_in": ["invented"],
            "uuid": "f1",
            "metadata": {"seed_dataset": "invented", "train_turns": [False, False, False, False, True]},
        }
    ],
    "hermes-function-calling-v1": [
        {
            "id": "g1",
            "conversations": [
                {"from": "system", "value": f"Call functions. <tools>{json.dumps([_TOOL])}</tools>"},
                *_turns("Tide at Brest?", _WRITTEN_CALL),
                {"from": "tool", "value": "<tool_response>4 m</tool_response>"},
                {"from": "gpt", "value": "Four metres."},
            ],
            "tools": json.dumps([{"type": "function", "function": _TOOL}]),
            "category": "Sea",
            "subcategory": "Tides",
            "task": "Look up a tide",
        }
    ],
    "ToolACE": [
        {
            "system": f"You may call functions: {json.dumps([_TOOL])}",
            "conversations": [
                *_turns("Tide at Brest?", '[tide(port="Brest")]', names=_OPEN),
                {"from": "tool", "value": '[{"name": "tide", "results": "4 m"}]'},
                {"from": "assistant", "value": "Four metres."},
            ],
        }
    ],
    "SWE-smith-trajectories": [
        {
            "messages": json.dumps(
                [
                    {**_SYSTEM, "agent": "main", "message_type": "system_prompt"},
                    {"role": "user", "content": "Mend the test.", "agent": "main", "message_type": "observation"},
                    {
                        "role": "assistant",
                        "content": "I look at it.",
                        "tool_calls": [{"type": "function", "id": "h1", "function": _CALL}],
                        "agent": "main",
                        "message_type": "action",
                    },
                    {"role": "tool", "content": "1 failed", "tool_call_ids": ["h1"], "message_type": "observation"},
                    {"role": "assistant", "content": "Done.", "agent": "main", "message_type": "action"},
                ]
            ),
            "instance_id": "invented__sea.1",
            "resolved": True,
            "model": "invented",
            "traj_id": "sea.1",
            "patch": "--- a\n+++ b\n",
        }
    ],
    "alpaca": [
        {"instruction": "Name a sea.", "input": "", "output": "The Baltic.", "text": "Below is an instruction ..."},
        {"instruction": "Sort.", "input": "b, a", "output": "a, b", "text": "Below is an instruction ..."},
    ],
    "MetaMathQA": [
        {"type": "GSM_Rephrased", "query": "2 plus 3?", "original_question": "2 + 3?", "response": "The answer is: 5"}
    ],
    "Magpie-Pro": [
        {
            "uuid": "i1",
            "model": "invented",
            "gen_input_configs": {"temperature": 1.0, "seed": None, "pre_query_template": "<|user|>"},
            "instruction": _SEAS[0],
            "response": _SEAS[1],
            "conversations": _turns(*_SEAS[:2]),
            "task_category": "Information seeking",
            "difficulty": "easy",
        }
    ],
    "gsm8k (SFT)": [{"question": "Two boats and three more?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}],
    "gsm8k (RL)": [{"question": "Two boats and three more?", "answer": "2 + 3 = <<2+3=5>>5\n#### 5"}],
    "hh-rlhf": [
        {
            "chosen": "\n\nHuman: Name a sea.\n\nAssistant: The Baltic.",
            "rejected": "\n\nHuman: Name a sea.\n\nAssistant: The Alps.",
        }
    ],
    "kto-mix-14k": [
        {"prompt": _messages(_SEAS[0]), "completion": _PAIR["chosen"][1:], "label": True},
        {"prompt": _messages(_SEAS[0]), "completion": _PAIR["rejected"][1:], "label": False},
    ],
    "lmsys-chat-1m, WildChat-1M": [
        {
            "conversation_id": "j1",
            "model": "invented",
            "conversation": _messages(*_SEAS),
            "turn": 2,
            "language": "English",
            "openai_moderation": [{"flagged": False}],
            "redacted": False,
        },
        {
            "conversation_hash": "k1",
            "model": "invented",
            "timestamp": "2023-04-09 00:02:53",
            "conversation": _messages(*_SEAS, **_WILD),
            "turn": 2,
            "language": "French",
            "openai_moderation": [{"flagged": False}],
            "toxic": False,
            "redacted": False,
        },
    ],
    "medical-o1-reasoning-SFT": [
        {"Question": "What cures scurvy?", "Complex_CoT": "Sailors lacked fruit.", "Response": "Vitamin C."}
    ],
    "DeepScaleR-Preview": [{"problem": "What is $2 + 3$?", "answer": "5", "solution": "Count on from 2."}],
    "DAPO-Math-17k": [_VERL],
    "Skywork-OR1-RL-Data": [
        {**_VERL, "reward_model": {"ground_truth": '["5"]', "style": "rule"}, "extra_info": {"index": 3}}
    ],
    "ultrafeedback_binarized": [
        {
            "prompt": _SEAS[0],
            "prompt_id": "l1",
            **_PAIR,
            "messages": _PAIR["chosen"],
            "score_chosen": 8.5,
            "score_rejected": 3.0,
        }
    ],
    "tulu-3-preference-mixture": [{"id": "m1", "source": "invented", "prompt": _SEAS[0], **_PAIR}],
    "databricks-dolly-15k": [
        {"instruction": "Which sea?", "context": "Odessa lies on the Black Sea.", "response": "The Black Sea."}
        | {"category": "closed_qa"},
        {"instruction": "Name a sea.", "context": "", "response": "The Baltic.", "category": "open_qa"},
    ],
    "OpenOrca": [
        {"id": "n.1", "system_prompt": "Explain.", "question": _SEAS[0], "response": "It is the Black Sea."},
        {"id": "n.2", "system_prompt": "", "question": _SEAS[2], "response": "The Mediterranean."},
    ],
    "CodeFeedback-Filtered": [{"query": "Print 5.", "answer": "print(5)", "resource": "invented", "lang": "python"}],
    "orca_dpo_pairs": [
        {"system": "Be terse.", "question": _SEAS[0], "chosen": "The Black Sea.", "rejected": "The Red Sea."},
        {"system": "", "question": _SEAS[0], "chosen": "The Black Sea.", "rejected": "The Red Sea."},
    ],
    "OpenHermes-2.5": [
        {
            "conversations": _turns(*_SEAS[:2], weight=None),
            "system_prompt": "You are a pirate.",
            "source": "invented",
            "category": "sea",
            "model_name": None,
            "title": None,
            "hash": None,
            "id": None,
        },
        {
            "conversations": [
                {"from": "system", "value": "You are a pirate.", "weight": None},
                *_turns("Bye.", "Ahoy."),
            ],
            "system_prompt": "You are a pirate.",
            "source": "invented",
            "category": "sea",
            "model_name": "invented",
            "title": "Farewell",
            "hash": 7,
            "id": "o1",
        },
    ],
    "smoltalk2": [
        {
            "messages": _messages(*_SUM),
            "chat_template_kwargs": {
                "custom_instructions": "You are a pirate.",
                "enable_thinking": True,
                "python_tools": None,
                "xml_tools": None,
            },
            "source": "invented",
        }
    ],
    "xlam-function-calling-60k": [
        {"id": 7, "query": "Tide at Brest?", "answers": json.dumps([_CALL]), "tools": json.dumps([_TOOL])}
    ],
    "glaive-function-calling-v2": [
        {
            "system": f"SYSTEM: You may use these functions -\n{json.dumps(_TOOL)}\n\n",
            "chat": "USER: Tide at Brest?\n\n\nASSISTANT: <functioncall> "
            '{"name": "tide", "arguments": \'{"port": "Brest"}\'} <|endoftext|>\n\n\n'
            'FUNCTION RESPONSE: {"height": "4 m"}\n\n\nASSISTANT: Four metres. <|endoftext|>\n\n\n',
        }
    ],
    "LLaVA-Instruct-150K": [
        {"id": "p1", "image": "p1.jpg", "conversations": _turns("<image>\nWhat colour is it?", "Red.")}
    ],
}
"""The rows of each line of the page's table, by the data set's name there."""
