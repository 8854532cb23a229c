"""slime's data source over a mixture: each prompt has the name of its part, and a checkpoint continues every part."""

from __future__ import annotations

from collections import Counter

import pytest

from asyncdata import ConfigError
from tests.support.slime_source import no_rollout, set_rollout_id, source_of, write_prompts

__all__ = ("no_rollout",)

pytestmark = pytest.mark.usefixtures("no_rollout")


@pytest.fixture
def mix(tmp_path):
    for name, number in (("math", 40), ("code", 30)):
        write_prompts(tmp_path / f"{name}.jsonl", number)
    file = tmp_path / "mix.toml"
    file.write_text('quota = 4\n[parts]\nmath = {source = "math.jsonl", weight = 3}\ncode = "code.jsonl"\n')
    return str(file)


def sources(groups):
    return [(group[0].metadata["source_name"], group[0].label) for group in groups]


def test_every_sample_of_a_group_names_its_part(mix):
    with source_of(None, asyncdata_mix=mix, n_samples_per_prompt=2) as source:
        groups = source.get_samples(8)

    assert Counter(name for name, _ in sources(groups)) == {"math": 6, "code": 2}
    assert all(len({sample.metadata["source_name"] for sample in group}) == 1 for group in groups)
    assert all(sample.metadata["tags"] == ["a", "b"] for group in groups for sample in group), "as in the row"
    assert [sample.index for group in groups for sample in group] == list(range(16))


def test_a_checkpoint_continues_every_part(mix, tmp_path):
    with source_of(None, asyncdata_mix=mix, save=str(tmp_path / "save")) as source:
        whole = sources(source.get_samples(60))
    with source_of(None, asyncdata_mix=mix, save=str(tmp_path / "save")) as source:
        set_rollout_id(0)
        source.get_samples(25)
        source.save(0)
    with source_of(None, asyncdata_mix=mix, load=str(tmp_path / "save")) as source:
        source.load(0)

        assert sources(source.get_samples(35)) == whole[25:]


def test_the_order_of_slimes_own_data_source_has_no_mixtures(mix):
    with (
        pytest.raises(ConfigError, match="AD471 asyncdata_order: legacy"),
        source_of(None, asyncdata_mix=mix, asyncdata_order="legacy"),
    ):
        pass
