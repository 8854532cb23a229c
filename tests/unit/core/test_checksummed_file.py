"""Files with a header that has the length and the digest of what follows."""

from __future__ import annotations

import os

import pytest

from asyncdata import SnapshotError
from asyncdata.core import checksummed_file
from asyncdata.core.checksummed_file import pack, unpack_file


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path, monkeypatch):
    path, payload = tmp_path / "state", b"x" * (1 << 20)
    path.write_bytes(pack(payload, "msgpack", schema=1, library="0") + payload)
    assert bytes(unpack_file(str(path))[1]) == payload
    memory = checksummed_file._memory  # noqa: SLF001 - called between the header and the payload

    def shrinking(num_bytes: int) -> memoryview:
        os.truncate(path, path.stat().st_size - 1)
        return memory(num_bytes)

    monkeypatch.setattr(checksummed_file, "_memory", shrinking)
    with pytest.raises(SnapshotError, match="it was cut off while it was read"):
        unpack_file(str(path))
