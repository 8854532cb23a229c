"""What is no data file, by its first bytes or its name."""

from __future__ import annotations

import os
import re

_BY_PYTHON = "read it with Python, by IterableSource"
_BY_DATASETS = "read it with HuggingFaceSource('{}', data_files=..., split='train')"
_NO_DATA = (
    (rb"version https://git-lfs", "a Git LFS pointer, not the data: git lfs pull"),
    (rb"(\.\./)*(\.git)?/annex/objects/", "a pointer of git-annex, not the data: git annex get"),
    (rb"(?i)(\xef\xbb\xbf)?\s*<(!doctype|!--|html|head|\?xml|error)", "HTML or XML, such as the page of an error"),
    (rb"\xfd7zXZ\0", "compressed with xz, which is not read: decompress it, or use zstd"),
    (rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "compressed with bz2, which is not read: decompress it, or use zstd"),
    (rb"(?s)PK\x03\x04.{26}(\[Content_Types|_rels/|docProps/|xl/)", f"an Excel workbook: {_BY_PYTHON}"),
    (rb"PK(\x03\x04|\x05\x06)", f"a zip archive: unzip it, or {_BY_PYTHON}"),
    (rb"(?s)(?=.{257}ustar)[^\0]{1,100}\0", "a tar archive: unpack it"),
    (rb"ARROW1\0\0|\xff{4}", f"Arrow: {_BY_DATASETS.format('arrow')}"),
    (rb"\x80[\x02-\x05]", f"a pickle, which may run any code: {_BY_PYTHON}"),
    (rb"\x1f\x8b|\x28\xb5\x2f\xfd", "compressed twice: decompress it once"),
)
"""What is no data file, by the first bytes of its text: no JSON begins so."""
_NO_DATA_BY_NAME = {
    **dict.fromkeys((".csv", ".tsv"), f"CSV: {_BY_DATASETS.format('csv')}, or {_BY_PYTHON}"),
    **dict.fromkeys((".pkl", ".pickle"), _NO_DATA[-2][1]),
}
"""The same of texts that have no first bytes of their own, by the suffix, if they do not begin as JSON does."""


def why_no_data(path: str, head: bytes) -> str:
    """What a file is if it cannot be one with rows, and the way out; empty for all others.

    :param head: its first bytes, decompressed.
    """
    for pattern, what in _NO_DATA:
        if re.match(pattern, head):
            return what

    return _NO_DATA_BY_NAME.get(os.path.splitext(path)[1].lower(), "")
