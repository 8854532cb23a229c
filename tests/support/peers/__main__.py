"""Writes the records of peers: ``python -m tests.support.peers slime=COMMIT miles=COMMIT``. See ``records``."""

import logging
import os
import sys
import tempfile
from pathlib import Path

from tests.support.peers import rollouts, xtuner  # noqa: F401 - each registers its records
from tests.support.peers.records import RECORDS, write_record

if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable()
    commits = dict(word.split("=") for word in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        for name, record in RECORDS.items():
            if record.peer in commits:
                write_record(name, commits[record.peer], Path(folder))
