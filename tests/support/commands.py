"""Commands of asyncdata, as tests run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncdata
from asyncdata.demo import tokenizer_folder
from tests.support.signals import hear_ctrl_c

ROOT = Path(asyncdata.__file__).parents[1]
NUM_ROWS = 200
"""Of the file that the fixture ``data`` writes."""

INLINE = ("--tokenizer", tokenizer_folder(), "--num-workers", "0")


def asyncdata_process(*words: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "asyncdata", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=hear_ctrl_c, **{**pipes, **options})
