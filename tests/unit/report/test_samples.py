"""Samples of a page: what is shown of each, and how much."""

from __future__ import annotations

from asyncdata.report.plain_text import script_json
from asyncdata.report.samples import MAX_SAMPLE_CHARS, Run, Samples, ShownSample, ShownText


def shown(*runs: Run, **fields: object) -> ShownSample:
    return ShownSample(position="0:0:1", place="a.jsonl:2", texts=[ShownText("", list(runs))], **fields)


def texts_of(samples: Samples) -> list[str]:
    return ["".join(text for _, runs in sample["texts"] for text, _ in runs) for sample in samples.shown]


def test_each_run_has_its_kind_and_whether_it_is_trained():
    samples = Samples()
    samples.add(
        shown(
            Run("user", "role"), Run("a"), Run("b", is_trained=True), Run("<|end|>", "special", True), Run("⇥", "sign")
        )
    )

    assert samples.shown[0]["texts"] == [["", [["user", 6], ["a", 0], ["b", 1], ["<|end|>", 3], ["⇥", 4]]]]


def test_what_cannot_be_seen_is_shown_in_every_text_of_a_sample():
    samples = Samples()
    hidden = "\u202e"
    samples.add(ShownSample(position="0:0:1", place=f"a{hidden}", source=hidden, reason=hidden, facts={hidden: hidden}))
    samples.add(shown(Run(hidden)))

    assert hidden not in script_json(samples.shown)


def test_of_a_long_sample_the_first_and_the_last_half_are_shown_with_a_note_of_how_much_is_not():
    samples = Samples()
    samples.add(shown(Run("a" * 600_000), Run("b", is_trained=True), Run("c" * 399_999)))

    half = MAX_SAMPLE_CHARS // 2
    note = f"\n⟨… {1_000_000 - MAX_SAMPLE_CHARS:,} characters are not shown …⟩\n"
    assert texts_of(samples) == ["a" * half + note + "c" * half]


def test_a_shortened_sample_keeps_the_order_and_the_kinds_of_its_ends():
    samples = Samples()
    samples.add(
        shown(Run("12", is_trained=True), Run("x" * 2 * MAX_SAMPLE_CHARS), Run("34"), Run("56", is_trained=True))
    )

    (_, runs), *_ = samples.shown[0]["texts"]
    assert runs[0] == ["12", 1]
    assert runs[-2:] == [["34", 0], ["56", 1]]


def test_samples_beyond_the_most_are_counted():
    samples = Samples(max_samples=2)
    for _ in range(5):
        samples.add(shown(Run("a")))

    assert (len(samples.shown), samples.num_left_out, samples.is_full) == (2, 3, True)


def test_samples_beyond_the_most_bytes_are_counted_and_the_text_is_bounded():
    samples = Samples(max_bytes=100_000)
    for _ in range(50):
        samples.add(shown(Run("é" * MAX_SAMPLE_CHARS)))

    assert len(samples.shown) + samples.num_left_out == 50
    assert 100_000 <= len(script_json(samples.shown).encode()) < 100_000 + 3 * MAX_SAMPLE_CHARS
