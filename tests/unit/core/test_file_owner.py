"""What another user may have written in a cache folder is never believed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from asyncdata import ConfigError, DataLoader, SnapshotError
from asyncdata.core.checksummed_file import unpack_file
from asyncdata.core.file_owner import check_ours
from asyncdata.prefetch.row_index.index_file import IndexFile
from asyncdata.tokenization.encoders.equivalence_records import Proof, find, keep, proof_path, subject_of
from asyncdata.tokenization.tokenizer_files import TokenizerFiles
from tests.support.backends import Fake, install
from tests.support.other_users import give_away
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from asyncdata.tokenization.encoders.equivalence_records import Subject


def another_users(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(path, monkeypatch)


def writable_by_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(path.stat().st_mode | 0o002)


def a_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


CHANGES = [another_users, writable_by_all, a_link]
REASONS = {
    another_users: r"belongs to another user \(uid ",
    writable_by_all: "can be written by every user",
    a_link: "or a link",
}


@pytest.mark.parametrize("is_folder", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_ours_is_refused_and_says_why(tmp_path, monkeypatch, change, is_folder):
    path = tmp_path / "kept"
    check_ours(str(path), "Cache(folder=...)", is_folder=is_folder)  # nothing is there
    path.mkdir(0o700) if is_folder else path.write_bytes(b"")
    check_ours(str(path), "Cache(folder=...)", is_folder=is_folder)

    change(path, monkeypatch)

    with pytest.raises(ConfigError, match=f"^AD611 {path} .*{REASONS[change]}.* choose a folder of your own by Cache"):
        check_ours(str(path), "Cache(folder=...)", is_folder=is_folder)


@pytest.mark.parametrize("is_folder", [False, True])
def test_a_file_is_no_folder_and_a_folder_no_file(tmp_path, is_folder):
    path = tmp_path / "kept"
    path.write_bytes(b"") if is_folder else path.mkdir()

    with pytest.raises(ConfigError, match="^AD611 .* is no "):
        check_ours(str(path), "Cache(folder=...)", is_folder=is_folder)


def test_a_group_may_write_where_its_owner_lets_it(tmp_path):
    """As volumes of a cluster are mounted."""
    tmp_path.chmod(0o2770)

    check_ours(str(tmp_path), "Cache(folder=...)", is_folder=True)


# The row index.


def loader(tmp_path: Path, kind: str = "jsonl") -> DataLoader:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("".join(f'{{"id": {number}}}\n' for number in range(50)))
    elif not path.exists():
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"id": list(range(50))}), path)
    settings = {"shuffle": "full", "cache": {"folder": str(tmp_path / "cache")}, "num_workers": 0, "timeout_s": 240}
    return DataLoader(str(path), tokenize_fn=row_id, **settings)


@pytest.mark.thorough
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("kind", "suffix"), [("jsonl", ".index"), ("parquet", ".index"), ("parquet", ".rows")])
def test_a_row_index_that_another_user_may_have_written_is_refused(tmp_path, monkeypatch, kind, suffix, change):
    with loader(tmp_path, kind) as before:
        before.get_next_batch(50)
    (kept,) = (tmp_path / "cache" / "index").glob(f"*{suffix}")

    change(kept, monkeypatch)

    with pytest.raises(ConfigError, match=f"^AD611 {kept} .*{REASONS[change]}.*choose a folder of your own by Cache"):
        with loader(tmp_path, kind) as after:
            after.get_next_batch(1)


@pytest.mark.parametrize("change", [another_users, writable_by_all])
def test_an_index_file_that_changes_hands_while_it_is_opened_is_not_read(tmp_path, monkeypatch, change):
    IndexFile(str(tmp_path), "abc").close()
    change(tmp_path / "abc.index", monkeypatch)

    with pytest.raises(PermissionError, match=REASONS[change]):
        IndexFile(str(tmp_path), "abc")


# Proofs about tokenizers.


@pytest.fixture
def subject(monkeypatch: pytest.MonkeyPatch, small_tokenizer: Path) -> Subject:
    files = TokenizerFiles(str(small_tokenizer))
    right = Fake(files.load(), lambda _: False)
    install(monkeypatch, {"gigatoken": lambda: right})
    found = subject_of(files, "gigatoken")
    assert found is not None
    return found


@pytest.mark.parametrize("change", CHANGES)
def test_a_proof_that_another_user_may_have_written_is_none(subject, monkeypatch, change):
    keep(Proof(subject=subject, exceptions=[(5, 7)]))
    path = Path(proof_path(subject))
    assert find(subject) is not None

    change(path, monkeypatch)

    assert find(subject) is None
    with pytest.raises((SnapshotError, OSError)):
        unpack_file(str(path), must_be_ours=True)
