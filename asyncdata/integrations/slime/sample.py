"""slime's own samples, made from asyncdata's; and the framework that runs the data source: slime, its relative miles,
or neither.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from asyncdata.core.types import Sample
from asyncdata.core.types import Status as _Status
from asyncdata.integrations.slime.torch_data import with_items

_PACKAGES = ("slime", "miles")
_CURRENT = "_current_rollout_id"
_ATOMS = frozenset((str, int, float, bool, type(None)))
"""Immutable types, which two samples may share."""

_decode = msgspec.msgpack.Decoder().decode


@dataclasses.dataclass
class _SpecInfo:
    """Tokens that speculative decoding drafted and accepted."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclasses.dataclass
class _PrefixCacheInfo:
    """Tokens that the engine's prefix cache had."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0


@dataclasses.dataclass
class SlimeSample:
    """Replaces slime's sample if slime is not installed: the same fields and defaults, without its methods."""

    Status = _Status
    SpecInfo = _SpecInfo
    PrefixCacheInfo = _PrefixCacheInfo

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: Any = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Any = None
    rollout_top_p_token_offsets: Any = None
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: _Status = _Status.PENDING
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: _SpecInfo = dataclasses.field(default_factory=_SpecInfo)
    prefix_cache_info: _PrefixCacheInfo = dataclasses.field(default_factory=_PrefixCacheInfo)


def resolve_sample_type() -> type[Any]:
    """The sample class of slime, or of its relative miles; :class:`SlimeSample` if neither is installed.

    If both are installed, it is the one that this process has imported.

    :raises ImportError: if one is installed, but cannot be imported.
    """
    names = [f"{package}.utils.types" for package in _PACKAGES]
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Sample  # type: ignore[no-any-return]
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # it is installed, and cannot import something else

    return SlimeSample


def package_of(sample_type: type[Any]) -> str | None:
    """The framework of the sample class: ``slime`` or ``miles``; None if neither is installed."""
    name = sample_type.__module__.partition(".")[0]
    return name if name in _PACKAGES else None


def current_rollout_id() -> int | None:
    """The rollout that the driver says is being generated. Imports nothing: a running driver is imported already."""
    return next((found for found in _told() if isinstance(found, int)), None)


def tells_rollouts() -> bool:
    """Whether the driver says which rollout it generates: slime does since v0.3.1, miles does not."""
    return bool(_told())


def _told() -> list[Any]:
    """What each driver that tells the rollout says; it may be None."""
    hooks = (sys.modules.get(f"{package}.rollout.sample_hooks") for package in _PACKAGES)
    return [getattr(module, _CURRENT) for module in hooks if hasattr(module, _CURRENT)]


def register(kind: type[Any], package: str | None) -> None:
    """Register ``kind`` as a virtual subclass of the framework's own ``DataSource``, if that can be imported."""
    if package is None:
        return

    try:
        base = importlib.import_module(f"{package}.rollout.data_source").DataSource
    except (ImportError, AttributeError):
        return  # an older driver, or one without this class

    if not issubclass(kind, base):
        base.register(kind)


def groups_of(
    samples: Iterable[Sample], kind: type[Any], size: int, first_group_index: int, first_index: int
) -> list[list[Any]]:
    """A group of fresh samples for each of ``samples``.

    A sample's ``extra["multimodal_inputs"]``, if a processor has made them, become ``multimodal_inputs``. The pictures
    and arrays in them are shared, so that they are not copied; no other mutable object is, not even with ``samples``.
    All other fields of slime's sample have their defaults.

    :param kind: slime's sample, or one like it.
    :param size: samples of a group.
    :param first_group_index: ``group_index`` of the first group; the next groups have the next numbers.
    :param first_index: ``index`` of the first sample; the next samples have the next numbers.
    """
    groups = []
    for group_index, sample in enumerate(samples, first_group_index):
        fields = {"prompt": sample.prompt, "label": sample.label, "metadata": sample.metadata}
        tokens = sample.tokens.tolist()
        copies = {name: _copies(value, size) for name, value in fields.items()}
        if (extra := sample.extra) and (inputs := extra.get("multimodal_inputs")) is not None:
            copies["multimodal_inputs"] = [containers_of(inputs) for _ in range(size)]
        group = []
        for number in range(size):
            made = kind()
            made.group_index, made.index = group_index, first_index + number
            made.tokens = tokens.copy()
            for name, values in copies.items():
                setattr(made, name, values[number])
            group.append(made)
        groups.append(group)
        first_index += size
    return groups


def containers_of(value: Any) -> Any:
    """A copy of nested containers with the same objects in them."""
    return with_items(value, containers_of) if isinstance(value, dict | list | tuple) else value


def _copies(value: Any, num_copies: int) -> list[Any]:
    """Deep copies of a JSON value. Decoding it for each copy is several times faster than ``copy.deepcopy``."""
    if type(value) in _ATOMS:
        return [value] * num_copies

    if type(value) is dict or type(value) is list:
        if not value or _ATOMS.issuperset(map(type, value.values() if type(value) is dict else value)):
            return [value.copy() for _ in range(num_copies)]

        with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
            text = msgspec.msgpack.encode(value)
            if _decode(text) == value:
                return [_decode(text) for _ in range(num_copies)]

    return [copy.deepcopy(value) for _ in range(num_copies)]  # NaN, lone surrogates, and values other than JSON
