"""slime's arguments, and the ``asyncdata_*`` keys beside them, to the settings of a loader.

slime has no flags for somebody else's data source, but ``--custom-config-path file.yaml`` makes every key of that file
an attribute of ``args`` before the data source is made; that is how the keys of :class:`Options` come here.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import asdict, replace

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import prepared
from asyncdata.integrations.slime.miles_chats import refuse_own_encoders, tool_form
from asyncdata.integrations.slime.rows import SlimeTokenizeFn
from asyncdata.integrations.slime.samples import package_of, resolve_sample_type
from asyncdata.loader.config import LoaderConfig, place_of
from asyncdata.loader.mix import Mix, mix_of_file
from asyncdata.order.shuffle import RowShuffle, Shuffle
from asyncdata.sources.arrow.parquet import ParquetSource
from asyncdata.sources.base import Source
from asyncdata.sources.jsonl import JsonlSource
from asyncdata.sources.resolve import described
from asyncdata.tokenization.functions.tokenizer_settings import BackendName

PREFIX = "asyncdata_"
NO_TOKENIZER = "none"
_OF_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
_OF_TOKENIZERS = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
_MAX_BYTES = 100 << 20

# slime's syntax: a path, and the rows [first:stop) of those that can be read. Other brackets are part of the name.
_SLICED = re.compile(r"(?P<path>.*)@\[(?P<first>(-?\d+)?):(?P<stop>(-?\d+)?)\]", re.DOTALL)


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The ``asyncdata_*`` keys, without the prefix. A key with the name of a setting of the loader sets that setting.

    :ivar order: ``legacy``: the same prompts, in the same order and with the same numbers, as slime's own data source,
        so that a run can switch in either direction, in the middle of an epoch. This is the default, as setting only
        ``--data-source-path`` must not change the run. It needs the number of rows before the first prompt of a
        shuffled epoch, and with ``rollout_max_prompt_len`` their lengths. ``stream``: asyncdata's own order, which
        starts at once whatever the size of the data, but has no ``len()``: give ``--num-rollout``. This is the default
        with ``use_hf_datasets``.
    :ivar pretokenize: fill ``tokens`` of each sample, so that the rollout need not tokenize. For rollout functions
        that read the prompt's tokens from it, such as slime's own.
    :ivar today: see :class:`~asyncdata.integrations.slime.rows.SlimeTokenizeFn`.
    :ivar revision: see there.
    :ivar strict_load: a missing checkpoint is an error, not a warning.
    :ivar allow_changed: what may differ from a checkpoint: names as in ``DataLoader.load_state_dict``, and
        ``n_samples_per_prompt``: groups of another size are dropped. A list, or names with commas.
    :ivar trust_remote_code: render and encode by transformers' ``AutoTokenizer`` in the workers, with the code that
        comes with the tokenizer: for tokenizers without ``tokenizer.json``.
    :ivar unpersistable: what ``add_samples`` does with a group that no checkpoint can store. ``error``: it is refused.
        ``serve_without_saving``: it is served like any other, and a restart loses it; such groups are counted, the
        first is logged, and a checkpoint names those that were in the buffer.
    :ivar same_rows: the files may have other names than in a checkpoint, if their content and order are the same.
        The run then continues at its position.
    :ivar processor: import path of a function of (args, media) that makes ``multimodal_inputs`` of a row's media,
        ``{"images": [...], "videos": [...], "audios": [...]}``. None: they are made as slime makes them.
    :ivar dataset: import path of a function of (args) that makes the dataset: an
        :class:`~asyncdata.integrations.hf_adapter.HFDatasetAdapterBase`, or an object with ``samples``, a
        length and ``shuffle(epoch_id)``, like slime's own. It then reads ``--prompt-data`` itself.
    :ivar mix: path of a file that describes a mixture (TOML, YAML or JSON), in place of ``--prompt-data``. Each sample
        then has ``metadata["source_name"]``, the name of its part. Needs ``order: stream``, which is its default.
    :ivar tokenizer_backend: see :class:`~asyncdata.tokenization.functions.tokenizer_settings.OfTokenizer`.
    :ivar bad_rows: a policy, or settings of :class:`~asyncdata.BadRows`. The policy is ``skip`` unless another is set,
        with no limit unless one is set: a bad row counts again in every epoch, and rollouts see many.
    :ivar outcomes: settings of :class:`~asyncdata.Outcomes`: the rewards of groups are remembered, and rows are left
        out of later epochs by them. Each sample's metadata then has ``asyncdata_row``.
    """

    order: Literal["legacy", "stream"] | None = None
    pretokenize: bool = False
    today: str | None = None
    revision: str | None = None
    strict_load: bool = False
    allow_changed: list[str] = []
    unpersistable: Literal["error", "serve_without_saving"] = "error"
    same_rows: bool = False
    processor: str | None = None
    dataset: str | None = None
    mix: str | None = None
    tokenizer_backend: BackendName = "auto"
    trust_remote_code: bool = False
    num_workers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    buffer_size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    timeout_s: Annotated[float, msgspec.Meta(gt=0)] | None = 600.0
    event_loop: str = "asyncio"
    limits: dict[str, Any] = {}
    cache: dict[str, Any] = {}
    bad_rows: dict[str, Any] | str = "skip"
    outcomes: dict[str, Any] | None = None


class SlimeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the data source reads from ``args``.

    :ivar source: the data; None: there is no dataset, and prompts are empty.
    :ivar is_global: ``rollout_global_dataset``; with False, saving and loading do nothing, as in slime.
    :ivar is_colocated: ``colocate``; only ``train.py`` runs so; it saves a rollout before it begins the next one.
    :ivar knobs: keyword arguments of the loader.
    """

    is_global: bool
    is_colocated: bool
    source: Source | Mix | None
    tokenize_fn: SlimeTokenizeFn | None
    knobs: dict[str, Any]
    order: Literal["legacy", "stream"]
    shuffled: bool
    samples_per_group: int
    reward_key: str | None
    buffer_filter_path: str | None
    dump_folder: str | None
    save_folder: str | None
    load_folder: str | None
    options: Options


def settings_of(
    args: Any, *, order: Literal["legacy", "stream"] = "legacy", samples_per_group: int | None = None
) -> SlimeSettings:
    """The settings in ``args``. A missing attribute has slime's default.

    :param order: the default order.
    :param samples_per_group: in place of ``n_samples_per_prompt``.
    :raises ConfigError: for an unknown ``asyncdata_*`` key, and for values that cannot work.
    """
    options = _options(args)
    is_streaming = bool(getattr(args, "use_hf_datasets", False))
    order = options.order or ("stream" if is_streaming or options.mix is not None else order)
    is_global = bool(getattr(args, "rollout_global_dataset", True))
    source, first, stop = _source(args, options, order) if is_global else (None, None, None)
    tokenize_fn = None if source is None else _tokenize_fn(args, options)
    shuffled = bool(getattr(args, "rollout_shuffle", False))
    only_kept = tokenize_fn is not None and tokenize_fn.max_length is not None
    knobs = _knobs(args, options, is_streaming)
    knobs["shuffle"] = _shuffle(order, shuffled, first, stop, only_kept)
    LoaderConfig.of(knobs)  # so that errors of settings are raised at the start
    return SlimeSettings(
        is_global=is_global,
        is_colocated=bool(getattr(args, "colocate", False)),
        source=source,
        tokenize_fn=tokenize_fn,
        knobs=knobs,
        order=order,
        shuffled=shuffled,
        samples_per_group=samples_per_group or _from_1(args, "n_samples_per_prompt", 1),
        reward_key=getattr(args, "reward_key", None),
        buffer_filter_path=getattr(args, "buffer_filter_path", None),
        dump_folder=getattr(args, "dump_details", None),
        save_folder=getattr(args, "save", None),
        load_folder=getattr(args, "load", None),
        options=options,
    )


def _options(args: Any) -> Options:
    given = {name.removeprefix(PREFIX): getattr(args, name) for name in dir(args) if name.startswith(PREFIX)}
    for name in given:
        if name not in Options.__struct_fields__:
            place = place_of(name)
            if place is not None and place.knob in Options.__struct_fields__:
                inside = "" if place.setting is None else f": {{{place.setting}: ...}}"
                raise ConfigError(f"there is no key {PREFIX}{name}; it is `{PREFIX}{place.knob}{inside}`")

            near = difflib.get_close_matches(name, Options.__struct_fields__, 1, 0.0)[0]
            raise ConfigError(f"there is no key {PREFIX}{name!s}; did you mean {PREFIX}{near}?")

    if isinstance(given.get("allow_changed"), str):
        given["allow_changed"] = [name.strip() for name in given["allow_changed"].split(",") if name.strip()]
    try:
        return msgspec.convert(given, prepared(Options))
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).replace("`$.", f"`{PREFIX}")) from error


def _source(args: Any, options: Options, order: str) -> tuple[Source | Mix | None, int | None, int | None]:
    """The data, with lines split, and values of Parquet, as slime reads them; and the first and last row of a slice."""
    if options.mix is not None:
        if order == "legacy":
            raise ConfigError(
                f"AD471 {PREFIX}order: legacy is the order of slime's own data source, which has no mixtures: leave it "
                f"out with {PREFIX}mix"
            )

        return mix_of_file(options.mix), None, None

    paths, first, stop = getattr(args, "prompt_data", None), None, None
    if isinstance(paths, str) and (found := _SLICED.fullmatch(paths)):
        first, stop = (int(found[name]) if found[name] else None for name in ("first", "stop"))
        paths = found["path"]
    source = None if paths is None else described(paths)
    if isinstance(source, ParquetSource):
        source = replace(source, python_values=True)
    elif isinstance(source, JsonlSource):
        source = replace(source, python_lines=True)
    return source, first, stop


def _shuffle(
    order: str, shuffled: bool, first: int | None, stop: int | None, only_kept: bool
) -> bool | Shuffle | RowShuffle:
    if order == "legacy":
        # With a first row, even 0, lines that are not JSON have no number: slime skips them before it shuffles.
        method: Literal["slime", "none"] = "slime" if shuffled else "none"
        return RowShuffle(method=method, first=first or 0, stop=stop, only_kept=only_kept)

    if first is None and stop is None:
        return shuffled

    return RowShuffle(method="keyed" if shuffled else "none", first=first, stop=stop, only_kept=only_kept)


def _from_1(args: Any, name: str, default: int) -> int:
    number = getattr(args, name, default)
    if not isinstance(number, int) or number < 1:
        raise ConfigError(f"{name} must be a whole number from 1 on, got {number!r}")

    return number


def _tokenize_fn(args: Any, options: Options) -> SlimeTokenizeFn:
    max_length = _max_length(args)
    applies_template = bool(getattr(args, "apply_chat_template", False))
    tokenizer = getattr(args, "hf_checkpoint", None)
    if tokenizer is None:
        if applies_template or max_length is not None or options.pretokenize:
            raise ConfigError("a chat template, a longest prompt and tokens need a tokenizer: give --hf-checkpoint")

        tokenizer = NO_TOKENIZER  # never read
    makes_tokens = max_length is not None or options.pretokenize
    multimodal_keys = getattr(args, "multimodal_keys", None)
    is_miles = (applies_template or multimodal_keys is not None) and package_of(resolve_sample_type()) == "miles"
    if is_miles and applies_template:
        refuse_own_encoders(tokenizer)
    return SlimeTokenizeFn(
        tokenizer,
        prompt_key=getattr(args, "input_key", "input"),
        label_key=getattr(args, "label_key", None),
        metadata_key=getattr(args, "metadata_key", "metadata"),
        tool_key=getattr(args, "tool_key", "tools"),
        multimodal_keys=multimodal_keys,
        apply_chat_template=applies_template,
        apply_chat_template_kwargs=_template_kwargs(args),
        max_length=max_length,
        pretokenize=options.pretokenize,
        today=options.today,
        revision=options.revision,
        tokenizer_backend=_backend(options, makes_tokens=makes_tokens),
        tool_form=tool_form() if is_miles else None,
        trust_remote_code=options.trust_remote_code,
        shows_media=tokenizer != NO_TOKENIZER and has_processor(tokenizer),
    )


def _backend(options: Options, *, makes_tokens: bool) -> BackendName:
    if not options.trust_remote_code:
        return options.tokenizer_backend if makes_tokens else "hf"  # nothing is encoded

    if options.tokenizer_backend not in ("auto", "hf"):
        raise ConfigError(
            f"{PREFIX}tokenizer_backend: {options.tokenizer_backend} has no effect with {PREFIX}trust_remote_code, "
            "where transformers encodes: leave one of them out"
        )

    return "hf"  # no library is proven against a tokenizer's own code


def has_processor(checkpoint: str) -> bool:
    """Whether a model takes images, videos or audio: then its folder has the settings of a processor."""
    folder = os.path.expanduser(checkpoint)
    return any(os.path.isfile(os.path.join(folder, name)) for name in _OF_PROCESSORS)


def _template_kwargs(args: Any) -> dict[str, Any]:
    """With the template of miles' ``--chat-template-path``, which takes precedence over the tokenizer's own."""
    kwargs: dict[str, Any] = getattr(args, "apply_chat_template_kwargs", None) or {}
    path = getattr(args, "chat_template_path", None)
    if path is None or "chat_template" in kwargs or not getattr(args, "apply_chat_template", False):
        return kwargs

    try:
        with open(path, encoding="utf-8") as file:
            return {**kwargs, "chat_template": file.read()}
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template-path {path} cannot be read: {error}") from error


def _max_length(args: Any) -> int | None:
    """The longest prompt. If only prompt and answer together are limited, slime leaves one token for the answer."""
    longest: int | None = getattr(args, "rollout_max_prompt_len", None)
    whole: int | None = getattr(args, "rollout_max_context_len", None)
    return whole - 1 if longest is None and whole is not None else longest


def _knobs(args: Any, options: Options, is_streaming: bool) -> dict[str, Any]:
    """The knobs. asyncdata's keys take precedence over the flags of slime's streaming datasets."""
    flags = {"buffer_size": "hf_dataset_buffer_size", "num_workers": "hf_dataset_num_proc"}
    asked = {knob: getattr(args, flag, None) for knob, flag in flags.items()} if is_streaming else {}
    ours = {name: value for name, value in asdict(options).items() if name in LoaderConfig.__struct_fields__}
    if getattr(args, "hf_dataset_shuffle_buffer", None) is not None:
        _from_1(args, "hf_dataset_shuffle_buffer", 1)  # only checked, as asyncdata shuffles whole files
    bad_rows = {"policy": options.bad_rows} if isinstance(options.bad_rows, str) else options.bad_rows
    return {
        **{name: value for name, value in (*asked.items(), *ours.items()) if value is not None},
        "timeout_s": options.timeout_s,
        "seed": getattr(args, "rollout_seed", 42),
        "bad_rows": {"policy": "skip", "max": None, **bad_rows},
    }


def dump_tokenizer(settings: SlimeSettings) -> None:
    """Copy the tokenizer's files, which may be among a model's files, to ``tokenizer`` in that folder, if there is one.

    :raises ConfigError: if they cannot be copied.
    """
    folder, fn = settings.dump_folder, settings.tokenize_fn
    if folder is None or fn is None or fn.tokenizer == NO_TOKENIZER:
        return

    target = os.path.join(folder, "tokenizer")
    try:
        os.makedirs(target, mode=0o700, exist_ok=True)
        with os.scandir(fn.folder().folder) as entries:
            for entry in entries:
                if entry.name.endswith(_OF_TOKENIZERS) and entry.is_file() and entry.stat().st_size <= _MAX_BYTES:
                    _copy(entry.path, os.path.join(target, entry.name))
    except OSError as error:
        raise ConfigError(f"the tokenizer cannot be copied to --dump-details {folder}: {error}") from error


def _copy(path: str, target: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(path, "rb") as source, open(os.open(target, flags, 0o600), "wb") as file:
        shutil.copyfileobj(source, file)
