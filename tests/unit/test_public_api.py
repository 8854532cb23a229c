"""The public API is one explicit list, and importing it costs nothing that a user did not ask for."""

import json
import subprocess
import sys

import pytest

import asyncdata
from asyncdata import errors, filters, xtuner
from tests.support.release import ROOT

HEAVY = {"datasets", "pyarrow", "ray", "torch", "transformers"}


def modules_after(statements: str) -> set[str]:
    code = f"import sys\n{statements}\nnames = sorted(sys.modules)\nimport json\nprint(json.dumps(names))"
    command = [sys.executable, "-c", code]
    return set(json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout))


def test_a_public_name_resolves_and_says_what_it_is_and_another_is_an_attribute_error():
    for name in asyncdata.__all__:
        assert getattr(asyncdata, name).__doc__, name
        assert name in dir(asyncdata)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = asyncdata.no_such_name


@pytest.mark.parametrize("module", [errors, filters, xtuner])
def test_the_names_of_a_public_module_are_a_sorted_list_and_are_explained(module):
    assert module.__name__.rpartition(".")[2] in dir(asyncdata)
    assert list(module.__all__) == sorted(set(module.__all__), key=str.casefold)
    assert all(getattr(module, name).__doc__ for name in module.__all__)
    assert not {*module.__all__} & {*asyncdata.__all__}


def test_public_modules_need_no_import_of_their_own():
    imported = modules_after("import asyncdata\nasyncdata.errors.EndOfData") - modules_after("import typing")

    assert {name for name in imported if name.startswith("asyncdata.")} == {
        *("asyncdata.core", "asyncdata.core.errors", "asyncdata.errors")
    }


def test_importing_the_package_imports_typing_and_two_small_modules():
    imported = modules_after("import asyncdata") - modules_after("import __future__, importlib, typing")
    assert imported == {"asyncdata", "asyncdata.core"}


def test_resolving_every_public_name_imports_no_framework():
    imported = modules_after("import asyncdata\nfor name in asyncdata.__all__: getattr(asyncdata, name)")

    assert "asyncdata.loader.loader" in imported
    assert imported & HEAVY == set()
