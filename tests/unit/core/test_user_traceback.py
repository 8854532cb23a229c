"""A user's traceback is the user's."""

from __future__ import annotations

import traceback

import asyncdata
from asyncdata import ConfigError
from asyncdata.core.import_path import resolve_path
from asyncdata.core.user_traceback import user_traceback
from asyncdata.tokenization.base import open_tokenize_fn


def test_of_a_module_that_cannot_be_imported_its_own_frames_are_left(tmp_path, monkeypatch):
    (tmp_path / "broken_here.py").write_text("def f():\n    raise ImportError('x')\nf()\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        resolve_path("broken_here:fn")
    except ConfigError as error:
        lines = user_traceback(error).splitlines()

    assert lines[0] == "Traceback (most recent call last):"
    assert [line.strip().split(", ")[1:] for line in lines if line.startswith('  File "')] == [
        ["line 3", "in <module>"],
        ["line 2", "in f"],
    ]
    assert lines[-1] == "ImportError: x"
    assert not any(asyncdata.__path__[0] in line or "importlib" in line for line in lines)


def test_where_no_frame_is_the_users_the_error_is_one_line():
    try:
        raise ConfigError("only words")
    except ConfigError as error:
        error.__traceback__ = None
        assert user_traceback(error).strip() == "asyncdata.core.errors.ConfigError: only words"


def test_frames_of_every_folder_of_the_package_are_left_out():
    class Broken:
        def resolve(self) -> Broken:
            return self

        def fingerprints(self) -> dict[str, str]:
            return {}

        def settings(self) -> dict[str, object]:
            return {}

        def open(self) -> None:
            raise RuntimeError("cannot be opened")

    try:
        open_tokenize_fn(Broken())
    except RuntimeError as error:
        raw, text = "".join(traceback.format_exception(error)), user_traceback(error)

    assert asyncdata.__path__[0] in raw
    assert asyncdata.__path__[0] not in text
    assert "cannot be opened" in text
