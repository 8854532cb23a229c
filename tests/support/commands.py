"""Commands of asyncdata, as tests run them."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import asyncdata
from asyncdata.demo import tokenizer_folder

ROOT = Path(asyncdata.__file__).parents[1]
NUM_ROWS = 200
"""Of the file that the fixture ``data`` writes."""

INLINE = ("--tokenizer", tokenizer_folder(), "--num-workers", "0")


def hear_ctrl_c() -> None:
    """In the child, before it runs: a shell starts its background jobs with SIGINT ignored, and that is inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def asyncdata_process(*words: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "asyncdata", *map(str, words)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, preexec_fn=hear_ctrl_c, **{**pipes, **options})
