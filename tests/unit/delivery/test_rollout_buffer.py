"""The rollout buffer: what may enter, and that no filter can lose a group, repeat one, or smuggle one in."""

from __future__ import annotations

import numpy as np
import pytest

from asyncdata import Sample
from asyncdata.delivery.rollout_buffer import without
from asyncdata.errors import ConfigError, InvalidGroupError
from asyncdata.filters import ByStaleness, first_in_first_out
from tests.support.chunks import chunk_of, made_by_hand
from tests.support.parts import SampleRange, filter_of, unpacked, validate_groups

# Filters


def test_a_filter_is_a_function_or_its_import_path_and_the_oldest_come_first_without_one():
    assert filter_of(None) is first_in_first_out
    assert filter_of(without) is without
    assert filter_of("asyncdata.delivery.rollout_buffer:without") is without
    assert filter_of(ByStaleness()) == ByStaleness(), "an object that can be called"


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (7, "a function of \\(buffer, num_groups\\), got int"),
        (ByStaleness, "got the class ByStaleness; make one of it"),
        ("asyncdata:__all__", "got tuple"),
        ("asyncdata.filters:ByStaleness", "got the class ByStaleness"),
        ("asyncdata.delivery.rollout_buffer:nothing", "AD420 cannot import"),
    ],
)
def test_what_is_no_filter_is_refused_when_the_loader_is_made(what, message):
    with pytest.raises(ConfigError, match=message):
        filter_of(what)


# What may enter


def test_a_group_enters_as_it_is_with_a_record_of_this_moment_and_releases_its_chunk():
    """Or one long rollout would keep hundreds of its neighbours in memory."""
    group = made_by_hand(1, 2, size=2, response="so far", extra={"score": np.float32(0.5)})
    sample = SampleRange(chunk_of([1, 2], [3]), 0, 1, 0, 0, 1).samples()[0]
    (item,) = validate_groups([group], 2, [])
    validate_groups([[sample]], 1, [item])
    assert item.group is group
    assert [Sample.from_dict(record).response for record in unpacked(item.record)] == ["so far"] * 2
    assert [record["extra"] for record in unpacked(item.record)] == [{"score": 0.5}] * 2
    assert sample._range is None  # noqa: SLF001
    assert (sample.tokens.tolist(), str(sample.position)) == ([1, 2], "0:0:0")


ONE, INSIDE = made_by_hand(1), made_by_hand(1, size=2)
TWICE = "AD432 group {} is in the buffer already, or has a sample twice; it would be served twice"


UNKNOWN = (
    "AD432 group 1: $.extra.images[0] is a builtins.object, which a snapshot cannot hold. Keep it elsewhere, or turn "
    "it into numbers, text, lists, dicts or numpy arrays"
)


@pytest.mark.parametrize(
    ("size", "groups", "message"),
    [
        (1, None, "AD432 add_samples takes a list of groups, got NoneType"),
        (1, iter([]), "AD432 add_samples takes a list of groups, got list_iterator"),
        (1, [ONE, Sample()], "AD432 group 1 must be a list of Sample, got Sample; a group of one sample is [sample]"),
        (1, [tuple(ONE)], "AD432 group 0 must be a list of Sample, got tuple"),
        (1, [[Sample(), "text", 5]], "AD432 group 0 must be a list of Sample, got a list of Sample, int, str"),
        (1, [ONE, []], "AD432 group 1 has 0 samples, and n_samples_per_prompt is 1"),
        (1, [made_by_hand(1, size=3)], "AD432 group 0 has 3 samples, and n_samples_per_prompt is 1"),
        (2, [INSIDE], TWICE.format(0)),
        (2, [[Sample(), INSIDE[1]]], TWICE.format(0)),
        (1, [ONE, made_by_hand(2), ONE], TWICE.format(2)),
        (2, [ONE * 2], TWICE.format(0)),
        (1, [ONE, made_by_hand(1, extra={"images": [object()]})], UNKNOWN),
    ],
)
def test_what_cannot_enter_is_refused_by_its_number(size, groups, message):
    with pytest.raises(InvalidGroupError) as caught:
        validate_groups(groups, size, validate_groups([INSIDE], 2, []))
    assert str(caught.value) == message
