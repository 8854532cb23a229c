"""``--mix`` of ``asyncdata sample`` and ``asyncdata inspect``: the rows are those that a loader delivers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from asyncdata import DataLoader, RowFn
from asyncdata.cli.main import main
from asyncdata.demo import tokenizer_folder
from asyncdata.loader.mix_file import mix_of_file

if TYPE_CHECKING:
    from pathlib import Path

TOKENIZER = ("--tokenizer", tokenizer_folder())
FN = "tests.support.tokenize_fns:id_and_text"


@pytest.fixture
def mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Part ``a`` has rows that are too long for ``--max-length 20``, part ``b`` a bad row."""
    monkeypatch.chdir(tmp_path)  # runs write a quarantine file
    for name, number in (("a", 50), ("b", 40)):
        rows = [json.dumps({"input": f"{name} {n} " * (1 + 9 * (n % 4 == 0)), "label": n}) for n in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*rows, "{" if name == "b" else ""]))
    (tmp_path / "mix.toml").write_text(
        'quota = 4\n[parts.a]\nsource = "a.jsonl"\nweight = 3\n[parts.b]\nsource = "b.jsonl"\nbad_rows = "quarantine"\n'
    )
    return str(tmp_path / "mix.toml")


@pytest.fixture
def inspected(mix: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """A function that gives the rows which ``inspect --json`` prints, without the total."""

    def run(*words: object) -> list[dict[str, Any]]:
        assert main(["inspect", "--mix", mix, *TOKENIZER, *map(str, words), "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()][:-1]

    return run


def delivered(mix: str, number: int, **knobs: Any) -> list[Any]:
    with DataLoader(mix_of_file(mix), num_workers=0, bad_rows="skip", **knobs) as loader:
        return loader.get_next_batch(number)


def test_a_sample_is_found_by_its_ordinal_and_its_position(mix: str, run_json: Any) -> None:
    wanted = delivered(mix, 90, tokenize_fn=RowFn())[-1]

    by_ordinal = run_json("sample", "--mix", mix, "--ordinal", 89)
    by_position = run_json("sample", "--mix", mix, "--position", wanted.position)

    assert {**by_ordinal, "ordinal": None} == by_position
    assert by_ordinal["position"] == str(wanted.position)
    assert by_ordinal["source"] == wanted.source_name
    assert (by_ordinal["path"], by_ordinal["byte_offset"]) == (wanted.source.path, wanted.source.byte_offset)
    assert json.loads(by_ordinal["row"])["label"] == by_ordinal["line"] - 1
    assert by_ordinal["tokens"] is None


def test_rows_that_yield_no_sample_do_not_count(mix: str, run_json: Any, tmp_path: Path) -> None:
    words = ("--mix", mix, *TOKENIZER, "--max-length", 20, "--num-workers", 0)
    run_json("run", *words, "--num-batches", 2, "--snapshot", tmp_path / "s", "--record", tmp_path / "record")
    wanted = json.loads((tmp_path / "record").read_text().splitlines()[-1])

    found = run_json("sample", *words, "--ordinal", 63)
    resumed = run_json("sample", *words, "--ordinal", 64, "--snapshot", tmp_path / "s")

    assert (found["position"], found["byte_offset"]) == (wanted["position"], wanted["byte_offset"])
    assert len(found["tokens"]) == wanted["num_tokens"]
    assert resumed == run_json("sample", *words, "--ordinal", 64)


def test_a_position_without_a_sample_is_refused_and_the_next_one_named(mix: str, run_json: Any, inspected: Any) -> None:
    dropped = next(row["position"] for row in inspected("--max-length", 20, "--num", 20) if row["dropped"])
    words = ("--mix", mix, *TOKENIZER, "--max-length", 20, "--num-workers", 0)

    message = run_json("sample", *words, "--position", dropped, status=1)["error"]["message"]

    assert f"there is no sample at {dropped}: the next one is at 0:0:" in message


def test_the_rows_are_those_of_the_first_samples_with_what_was_dropped_between_them(
    mix: str, run_json: Any, inspected: Any, tmp_path: Path
) -> None:
    record = tmp_path / "record"
    words = ("--mix", mix, *TOKENIZER, "--max-length", 20, "--num-workers", 0)
    run_json("run", *words, "--num-batches", 1, "--batch-size", 120, "--record", record)
    wanted = [json.loads(line) for line in record.read_text().splitlines()]

    rows = inspected("--max-length", 20, "--num", 120)

    samples = [row for row in rows if not row["dropped"] and not row["error"]]
    assert [(row["position"], row["path"], row["num_tokens"]) for row in samples] == [
        (row["position"], row["path"], row["num_tokens"]) for row in wanted
    ]
    assert len({row["position"] for row in rows}) == len(rows)
    assert all(row["path"].endswith(f"{row['source']}.jsonl") for row in rows)
    assert sum(row["dropped"] == "max_length" for row in rows) > 20
    assert any(row["error"] for row in rows)


def test_looking_at_a_mixture_writes_no_quarantine_file(
    mix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(path.name for path in tmp_path.iterdir())

    assert main(["order", "--mix", mix, "--num", "200", "--tokenizer", tokenizer_folder()]) == 0
    assert main(["inspect", "--mix", mix, "--num", "200", *TOKENIZER]) == 0
    assert main(["sample", "--mix", mix, "--ordinal", "200", "--num-workers", "0", *TOKENIZER]) == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_row_of_a_part_is_found_by_its_line(mix: str, run_json: Any, inspected: Any) -> None:
    (row,) = inspected("--row", "b.jsonl:7")

    assert (row["source"], row["line"], row["position"]) == ("b", 7, None)
    message = run_json("inspect", "--mix", mix, *TOKENIZER, "--row", "c.jsonl:7", status=1)["error"]["message"]
    assert "'c.jsonl:7' is not in a file of a part" in message


def test_each_part_is_shown_by_its_own_function(mix: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 0, "pad": "xx"}\n')
    (tmp_path / "two.toml").write_text(
        f'quota = 2\n[parts.a]\nsource = "a.jsonl"\ntokenize_fn = "{FN}"\n[parts.b]\nsource = "b.jsonl"\n'
    )

    assert main(["inspect", "--mix", str(tmp_path / "two.toml"), "--num", "2", "--kind", "prompt", *TOKENIZER]) == 0

    out = capsys.readouterr().out
    assert "a  " in out and "b  " in out
    assert "rows      2, of which 2 became samples" in out


def test_there_is_no_last_row_of_a_mixture(mix: str, run_json: Any) -> None:
    message = run_json("inspect", "--mix", mix, *TOKENIZER, "--num", 0, status=1)["error"]["message"]

    assert "--num 0 is not for --mix" in message


@pytest.mark.parametrize("command", ["sample", "inspect"])
def test_data_and_a_mixture_exclude_each_other(command: str, mix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "rows.jsonl", "--mix", mix, "--position", "0:0:0", *TOKENIZER])

    assert "name DATA, or a mixture by --mix FILE" in capsys.readouterr().err
