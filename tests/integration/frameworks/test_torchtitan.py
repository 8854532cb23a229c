"""The dataloader for torchtitan, with what its trainer gives it: that of 0.3, and of the interface after that."""

from contextlib import closing
from types import SimpleNamespace

import pytest

from asyncdata import ChatTokenizeFn, HardPacking, Mix, Part, SoftPacking
from asyncdata.demo import tokenizer_folder
from asyncdata.errors import ConfigError

pytest.importorskip("torch", reason="torch is not installed")

from tests.support.adapters import class_of

SHORT, LONG = "2.", "It is " + "two, " * 40
TOKENS = 256


@pytest.fixture
def chats(jsonl_file):
    question = {"role": "user", "content": "1 + 1?"}
    rows = [{"messages": [question, {"role": "assistant", "content": text}]} for text in (SHORT, LONG) * 4]
    return str(jsonl_file(rows))


@pytest.fixture
def build(small_tokenizer):
    """The loader as torchtitan builds it: with its own tokenizer, and contexts of 64 tokens."""

    loader_class = class_of("torchtitan", "AsyncDataLoader", "torchtitan")

    def built(lengths=None, **settings):
        config = loader_class.Config(num_workers=0, knobs={"shuffle": False, "timeout_s": 240}, **settings)
        given = {"tokenizer": SimpleNamespace(tokenizer_path=str(small_tokenizer)), "dp_world_size": 1, "dp_rank": 0}
        given |= lengths or {"max_context_length": 64, "num_tokens_per_batch": TOKENS}
        return closing(loader_class(config, **given))

    return built


def test_a_function_that_is_made_late_has_torchtitans_tokenizer_and_length(build, chats, small_tokenizer):
    got = []

    def make(tokenizer, length):
        got.append((tokenizer, length))
        return ChatTokenizeFn(tokenizer, max_length=length)

    with build(dataset=chats, make_tokenize_fn=make) as loader:
        inputs, labels = next(iter(loader))
    assert got == [(str(small_tokenizer), 64)]
    assert inputs["input"].shape == labels.shape == (TOKENS,)
    assert int((inputs["positions"] == 0).sum()) >= 4, "the four short rows; the long ones are dropped"


def test_labels_are_the_next_tokens_and_positions_begin_again_in_a_context(build, jsonl_file):
    rows = jsonl_file([{"tokens": list(range(1, 101))}, {"tokens": list(range(201, 221))}])
    with build(dataset=str(rows), tokenize_fn=lambda row: row) as loader:
        inputs, labels = next(iter(loader))
    assert inputs["positions"][:120].tolist() == [*range(64), *range(36), *range(20)]
    assert labels[:120].tolist() == [*range(2, 101), -100, *range(202, 221), -100]


@pytest.mark.parametrize("length", [64, None])
def test_a_function_of_torchtitans_tokenizer_and_length_is_taken(build, chats, small_tokenizer, length):
    with build(dataset=chats, tokenize_fn=ChatTokenizeFn(small_tokenizer, max_length=length)) as loader:
        next(iter(loader))
        loader.load_state_dict({})  # what torchtitan has of a checkpoint without a loader


def test_a_batch_of_torchtitan_0_3_has_rows(build, chats):
    lengths = {"snapshot_every_n_steps": None, "seq_len": 128, "local_batch_size": 2}
    make = lambda tokenizer, length: ChatTokenizeFn(tokenizer)  # noqa: E731
    with build(lengths, dataset=chats, make_tokenize_fn=make) as loader:
        inputs, labels = next(iter(loader))
    assert inputs["input"].shape == inputs["positions"].shape == labels.shape == (2, 128)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"tokenizer": tokenizer_folder(), "max_length": 64},
            "AD640 tokenize_fn has the tokenizer in .*demo_tokenizer",
        ),
        ({"max_length": 32}, "AD640 tokenize_fn has max_length=32, and torchtitan's contexts have 64 tokens"),
        ({"max_length": 2048}, "AD640 tokenize_fn has max_length=2048, and torchtitan's contexts have 64 tokens"),
    ],
)
def test_a_function_of_another_tokenizer_or_length_is_refused(build, chats, small_tokenizer, settings, message):
    function = ChatTokenizeFn(**{"tokenizer": small_tokenizer, **settings})
    for given in (
        {"dataset": chats, "tokenize_fn": function},
        {"dataset": Mix({"a": Part(chats, tokenize_fn=function)})},
    ):
        with pytest.raises(ConfigError, match=message):
            build(**given)


def test_two_tokenize_functions_and_packings_of_another_length_are_refused(build, chats, small_tokenizer):
    function = ChatTokenizeFn(small_tokenizer)
    with pytest.raises(ConfigError, match="AD640 tokenize_fn and make_tokenize_fn are both set"):
        build(dataset=chats, tokenize_fn=function, make_tokenize_fn=lambda tokenizer, length: function)
    for packing in (SoftPacking(max_length=128), HardPacking(max_length=512)):
        with pytest.raises(ConfigError, match=f"AD640 packing has max_length={packing.max_length}, and a batch .* 256"):
            build(dataset=chats, packing=packing)
