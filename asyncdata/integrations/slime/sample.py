"""slime's own samples: made from asyncdata's, and as records for a snapshot."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import sys
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from asyncdata.core.plain_values import from_builtins, to_builtins
from asyncdata.integrations.torch.tensor_values import tensors_from_plain, tensors_to_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.core.types import Sample

__all__ = ("SampleFactory", "SlimeSample", "from_record", "resolve_sample_type", "to_record")

_MODULES = ("slime.utils.types", "miles.utils.types")

_ATOMS = frozenset((str, int, float, bool, type(None)))
_PLAIN = list[str | int | float | bool | None]
"""Immutable types, which two samples may share."""

_ALWAYS_SET = ("tokens", "metadata")

_decode = msgspec.msgpack.Decoder().decode


@dataclasses.dataclass
class _SpecInfo:
    """Tokens that speculative decoding drafted and accepted."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    to_dict = dataclasses.asdict

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> _SpecInfo:
        """The inverse of :meth:`to_dict`."""
        return cls(**values)


@dataclasses.dataclass
class _PrefixCacheInfo:
    """Tokens that the engine's prefix cache had."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    to_dict = dataclasses.asdict

    @classmethod
    def from_dict(cls, values: dict[str, int]) -> _PrefixCacheInfo:
        """The inverse of :meth:`to_dict`."""
        return cls(**values)


class _Status(Enum):
    """The status of a rollout."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclasses.dataclass
class SlimeSample:
    """Replaces slime's sample if slime is not installed: the same fields, defaults, and dicts.

    It lacks slime's methods for an engine's replies (``append_response_tokens``).
    """

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

    def to_dict(self) -> dict[str, Any]:
        """Every attribute: the status as its value, the counts as dicts, and all others unchanged."""
        counts = {"spec_info": self.spec_info.to_dict(), "prefix_cache_info": self.prefix_cache_info.to_dict()}
        return vars(self) | {"status": self.status.value} | counts

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> SlimeSample:
        """The inverse of :meth:`to_dict`. Keys that are not fields become attributes."""
        sample = cls()
        vars(sample).update(values)
        sample.status = _Status(values["status"])
        sample.spec_info = _SpecInfo.from_dict(values.get("spec_info", {}))
        sample.prefix_cache_info = _PrefixCacheInfo.from_dict(values.get("prefix_cache_info", {}))
        return sample

    def get_reward_value(self, args: Any) -> Any:
        """The reward, or, of several, the one with the key ``args.reward_key``."""
        return self.reward[args.reward_key] if args.reward_key and isinstance(self.reward, dict) else self.reward

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)


def resolve_sample_type() -> type[Any]:
    """The sample class of slime, or of its relative miles; :class:`SlimeSample` if neither is installed.

    If both are installed, it is the one that this process has imported.

    :raises ImportError: if one is installed, but cannot be imported.
    """
    for name in sorted(_MODULES, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Sample  # type: ignore[no-any-return]
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise  # it is installed, and cannot import something else

    return SlimeSample


class SampleFactory:
    """Makes groups of fresh samples.

    A dataclass's constructor sets thirty fields one by one, most of them to their defaults. Instead, each sample gets a
    copy of a prototype's attributes, with new containers. A class for which this may differ from its constructor is
    constructed.

    :param sample_type: slime's sample, or one like it.
    :param n_samples_per_prompt: samples in a group.
    """

    def __init__(self, sample_type: type[Any], n_samples_per_prompt: int) -> None:
        self._type = sample_type
        self._n = n_samples_per_prompt
        self._prototype = _prototype(sample_type)

    def groups(self, samples: Sequence[Sample], first_group_index: int, first_index: int) -> list[list[Any]]:
        """One group for each of ``samples``. They share no mutable object, not even with ``samples``.

        A sample's ``extra["multimodal_inputs"]``, if a processor has made them, become ``multimodal_inputs``. All
        other fields of slime's sample have their defaults.

        :param first_group_index: ``group_index`` of the first group; the next groups have the next numbers.
        :param first_index: ``index`` of the first sample; the next samples have the next numbers.
        """
        groups = []
        for group_index, sample in enumerate(samples, first_group_index):
            groups.append(self._group(sample, group_index, first_index))
            first_index += self._n
        return groups

    def _group(self, sample: Sample, group_index: int, first_index: int) -> list[Any]:
        defaults, fresh = self._prototype or ({}, ())
        base = {**defaults, "group_index": group_index}
        owned = []
        for name, value in self._values(sample):
            if type(value) in _ATOMS:
                base[name] = value
            else:
                owned.append((name, iter(_copies(value, self._n))))

        new, kind, make_slowly = object.__new__, self._type, self._prototype is None
        tokens, metadata = sample.tokens.tolist(), _copies(sample.metadata, self._n)
        group = []
        for index, own_metadata in enumerate(metadata, first_index):
            fields = base.copy()
            fields["index"] = index
            fields["tokens"] = tokens.copy()
            fields["metadata"] = own_metadata
            for name, make in fresh:
                fields[name] = make()
            for name, copies in owned:
                fields[name] = next(copies)
            if make_slowly:
                made = self._construct(fields)
            else:
                made = new(kind)
                made.__dict__ = fields
            group.append(made)
        return group

    def _values(self, sample: Sample) -> list[tuple[str, Any]]:
        """The fields of slime's sample that come from asyncdata's, except tokens and metadata."""
        values = [("prompt", sample.prompt), ("label", sample.label)]
        if (extra := sample.extra) and (inputs := extra.get("multimodal_inputs")) is not None:
            values.append(("multimodal_inputs", inputs))
        return values

    def _construct(self, fields: dict[str, Any]) -> Any:
        sample = self._type()
        for name, value in fields.items():
            setattr(sample, name, value)
        return sample


def _prototype(kind: type[Any]) -> tuple[dict[str, Any], list[tuple[str, Callable[[], Any]]]] | None:
    """The attributes of a new instance, and the factories of those that must be new; None if a copy may be wrong.

    A copy is right for a dataclass without slots whose constructor only sets its fields.
    """
    if not dataclasses.is_dataclass(kind) or hasattr(kind, "__post_init__"):
        return None

    if kind.__setattr__ is not object.__setattr__ or kind.__new__ is not object.__new__:
        return None

    fields, factories, expected = getattr(kind(), "__dict__", {}), {}, {}
    for field in dataclasses.fields(kind):
        if field.default_factory is not dataclasses.MISSING:
            factories[field.name] = field.default_factory
        expected[field.name] = factories[field.name]() if field.name in factories else field.default
    if fields != expected:
        return None

    return fields, [(name, make) for name, make in factories.items() if name not in _ALWAYS_SET]


def _copies(value: Any, num_copies: int) -> list[Any]:
    """Deep copies of a JSON value. Decoding it for each copy is several times faster than ``copy.deepcopy``."""
    if type(value) is dict or type(value) is list:
        if not value or _ATOMS.issuperset(map(type, value.values() if type(value) is dict else value)):
            return [value.copy() for _ in range(num_copies)]

        with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
            text = msgspec.msgpack.encode(value)
            if _decode(text) == value:
                return [_decode(text) for _ in range(num_copies)]

    return [copy.deepcopy(value) for _ in range(num_copies)]  # NaN, lone surrogates, and values other than JSON


def to_record(sample: Any, *, in_blocks: bool = False) -> dict[str, Any]:
    """Every attribute of one of slime's samples as plain builtins (``core.plain_values``); nothing is shared.

    Plain values are as in slime's ``to_dict``: the status as its value, the counts as dicts.

    :param in_blocks: do not copy large arrays, but store them as ``plain_values.Block``: only these are shared.
    :raises TypeError: for a value that no snapshot can store, such as a set or a lock; the message names it.
    """
    default = type(sample)()
    values = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    values |= getattr(sample, "__dict__", {})
    return {
        name: _to_plain(value, getattr(default, name, None), f"$.{name}", in_blocks) for name, value in values.items()
    }


def _to_plain(value: Any, default: Any, path: str, in_blocks: bool) -> Any:
    if type(value) is list and (plain := _plain_list(value)) is not None:
        return plain

    if type(value) is type(default) and isinstance(value, Enum):
        value = value.value
    elif type(value) is type(default) and dataclasses.is_dataclass(value):
        value = vars(value)
    return to_builtins(tensors_to_plain(value, path), path, in_blocks=in_blocks)


def _plain_list(value: list[Any]) -> list[Any] | None:
    """A copy, if all items are plain, as in thousands of tokens and log-probabilities; otherwise None."""
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(value, _PLAIN)
    return None


def from_record(record: dict[str, Any], sample_type: type[Any] | None = None, blocks: memoryview | None = None) -> Any:
    """The inverse of :func:`to_record`. Keys for which the class has no field become attributes.

    :param sample_type: slime's sample, or one like it; by default that of :func:`resolve_sample_type`.
    :param blocks: the bytes of large arrays, if they are not in the record.
    """
    sample = (sample_type or resolve_sample_type())()
    for name, plain in record.items():
        value: Any = _plain_list(plain) if type(plain) is list else None
        if value is None:
            value = tensors_from_plain(from_builtins(plain, blocks))
        default = getattr(sample, name, None)
        if isinstance(default, Enum) and value is not None:
            value = type(default)(value)
        elif dataclasses.is_dataclass(default) and isinstance(value, dict):
            vars(default).update(value)
            continue
        setattr(sample, name, value)
    return sample
