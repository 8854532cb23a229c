"""JSON arrays: elements reach the worker as they are written, and what is wrong with an array is named by its place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from asyncdata import JsonArraySource, JsonlSource, Shuffle, SourceError
from asyncdata.sources.base import Source
from asyncdata.sources.stream import StreamOrder
from asyncdata.sources.text.text_stream import TextStream
from tests.support.streams import texts_of, write


def opened(paths: Any, **settings: Any) -> TextStream:
    return JsonArraySource(paths, **settings).open(1024)


def read(stream: Any, state: Any = None) -> list[bytes | None]:
    order = StreamOrder(Shuffle(enabled=False), 0, len(stream.files))
    found = stream.read(order, 0, state, bool)
    return [text for rows in found for text in texts_of(rows, stream.max_row_bytes)]


def read_until_fault(stream: TextStream) -> tuple[list[bytes | None], str]:
    found: list[bytes | None] = []
    with pytest.raises(SourceError) as caught:
        for rows in stream.read(StreamOrder(Shuffle(enabled=False), 0, 1), 0, None, bool):
            found += texts_of(rows)
    return found, str(caught.value)


def test_it_is_a_source():
    assert isinstance(JsonArraySource("rows.json"), Source)


def test_an_element_is_given_as_it_is_written(tmp_path):
    elements = [b'{"a":  "]}\\"", "b": [1,\n {"c": "\\\\"}]}', b"{}", b'"x,y"', b"-1e5", b"[[], [{}]]", b"null"]
    text = b"\xef\xbb\xbf \r\n[" + b" ,\n\t".join(elements) + b"\n] \n"

    assert read(opened(write(tmp_path / "a.json", text))) == elements


def test_an_array_that_is_named_json_is_known_by_its_first_bytes(tmp_path):
    path = write(tmp_path / "a.json", b'[{"id": 1}]')
    stream = JsonlSource(str(path)).open(1024)

    assert isinstance(stream, TextStream)
    assert read(stream) == [b'{"id": 1}']


def test_lines_in_a_file_that_is_named_json_are_lines(tmp_path):
    path = write(tmp_path / "a.json", b'{"id": 1}\n')

    assert not isinstance(JsonlSource(str(path)).open(1024), TextStream)


def test_a_folder_is_its_json_files(tmp_path):
    for name in ("b.json", "a.json", "c.jsonl"):
        write(tmp_path / name, b"[{}]")

    assert [file.path for file in opened(str(tmp_path)).files] == [str(tmp_path / "a.json"), str(tmp_path / "b.json")]


def test_real_arrays_are_read_as_json_reads_them(test_data):
    paths = [str(test_data / "babilong" / name) for name in ("qa1_4k.json", "qa1_32k.json")]
    expected = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            expected += json.load(file)

    assert [json.loads(text or b"") for text in read(opened(paths))] == expected


@pytest.mark.thorough
def test_elements_of_megabytes_are_read_whole(tmp_path):
    elements = [{"id": n, "text": 'a"\\\n' * 300_000, "deep": [[[n]]]} for n in range(4)]

    found = read(opened(write(tmp_path / "a.json", json.dumps(elements, indent=4).encode())))

    assert [json.loads(text or b"") for text in found] == elements


def test_of_an_element_that_is_too_long_only_the_length_is_known(tmp_path):
    elements = [{"id": 0}, {"id": 1, "text": "x" * 3_000_000}, {"id": 2}]
    stream = opened(write(tmp_path / "a.json", json.dumps(elements).encode()), max_row_bytes=100)

    found = list(stream.read(StreamOrder(Shuffle(enabled=False), 0, 1), 0, None, bool))

    assert read(stream) == [b'{"id": 0}', None, b'{"id": 2}']
    assert [length for rows in found for length in rows.lengths.tolist()] == [9, len(json.dumps(elements[1])), 9]


@pytest.mark.thorough
def test_reading_resumes_at_an_element_without_reading_those_before(tmp_path):
    elements = [json.dumps({"id": n, "pad": "x" * (n % 90)}).encode() for n in range(20_000)]
    path = write(tmp_path / "a.json", b"[" + b",\n".join(elements) + b"]")
    stream = opened(path)
    given = list(stream.read(StreamOrder(Shuffle(enabled=False), 0, 1), 0, None, bool))
    assert len(given) > 3

    count = 0
    for rows in given:
        assert rows.state is not None
        assert rows.state["entry"] == [rows.state["offset"]] * 2
        assert read(opened(path), rows.state) == elements[count:]
        count += len(rows.lengths)


def test_an_empty_array_has_no_rows(tmp_path):
    assert read(opened(write(tmp_path / "a.json", b" [ ] "))) == []


@pytest.mark.parametrize(
    ("text", "good", "reason"),
    [
        (b"[1, 2", 1, "it ends within element 1, which begins at byte 4, without ']'"),
        (b'[1, {"a": "x', 1, "it ends within element 1, which begins at byte 4, without ']'"),
        (b"[1, 2,", 2, "it ends after 2 elements, without ']'"),
        (b"[", 0, "it ends after 0 elements, without ']'"),
        (b"[1, 2] x", 2, "at byte 7, after its end, there is b'x'"),
        (b"[1][2]", 1, "at byte 3, after its end, there is b'[2]'"),
        (b"[1, , 2]", 1, "at byte 4 element 1 is missing"),
        (b"[1, 2,]", 2, "at byte 6 element 2 is missing"),
        (b"[,]", 0, "at byte 1 element 0 is missing"),
        (b"[1, 2}", 1, "at byte 5 there is '}' in place of its ']'"),
        (b'[{"a": [1}, 2]', 0, "it ends within element 0, which begins at byte 1, without ']'"),
    ],
    ids=repr,
)
def test_an_incomplete_array_is_named_after_its_elements(tmp_path, text, good, reason):
    path = write(tmp_path / "a.json", text)

    found, message = read_until_fault(opened(path))

    assert found == [b"1", b"2"][:good]
    assert message == f"AD120 {path} is not one whole JSON array: {reason}; repair the file"


def test_a_fault_within_an_element_is_left_to_the_worker(tmp_path):
    """Its row is bad, and the others are not."""
    found = read(opened(write(tmp_path / "a.json", b"[{'a': 1}, {\"b\" 2} {}, 3]")))

    assert found == [b"{'a': 1}", b'{"b" 2} {}', b"3"]


def test_a_file_that_is_no_array_is_refused_at_the_start(tmp_path):
    path = write(tmp_path / "a.json", b'{"id": 1}\n')

    with pytest.raises(
        SourceError, match=rf"^AD120 {path} is not a JSON array: it begins with b'\{{\"id\": 1\}}\\n'; read"
    ):
        opened(path)


def test_files_that_are_all_empty_are_refused(tmp_path):
    with pytest.raises(SourceError, match="^AD201 no rows in 1 files, all empty: "):
        opened(write(tmp_path / "a.json", b""))
