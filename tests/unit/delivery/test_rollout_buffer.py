"""The rollout buffer: what may enter, and that no filter can lose a group, repeat one, or smuggle one in."""

from __future__ import annotations

import pytest

from asyncdata import Sample
from asyncdata.errors import ConfigError, InvalidGroupError
from asyncdata.filters import ByStaleness
from tests.support.chunks import made_by_hand
from tests.support.parts import filter_of, validate_groups


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
