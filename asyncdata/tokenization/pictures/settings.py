"""What a processor of transformers is to do with pictures, and which columns it gives."""

from __future__ import annotations

import json
import os
import re
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from asyncdata.core.errors import ConfigError
from asyncdata.core.identity import canonical, digest
from asyncdata.core.settings import Description
from asyncdata.tokenization.tokenizer_files import resolve

if TYPE_CHECKING:
    from collections.abc import Collection

    from asyncdata.core.columns import Column

RULE = "frames of the header, or packets: 1"
"""How frames of videos are counted, and their rate is known: a part of fingerprints."""

Positive = Annotated[int, msgspec.Meta(ge=1)]

GRID, MROPE = "image_grid_thw", "mrope"
VIDEO_PIXELS, VIDEO_GRID, SECONDS = "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"
FEATURES, NUM_FRAMES = "input_features", "num_audio_frames"
_QWEN = ("Qwen2VLProcessor", "Qwen2_5_VLProcessor", "Qwen3VLProcessor")
_OMNI = "Qwen2_5OmniProcessor"
_SOUNDS = {
    "Qwen2AudioProcessor": "feature_attention_mask",
    _OMNI: "feature_attention_mask",
    "Gemma3nProcessor": "input_features_mask",
    "Gemma4Processor": "input_features_mask",
}
"""The families of which sounds are read, and the column of the mask of their features."""

_TYPES = {"Gemma3Processor": "token_type_ids", "Gemma3nProcessor": "token_type_ids"}
_TYPES |= dict.fromkeys(("InternVLProcessor", "Qwen2AudioProcessor", _OMNI), "")
_FAMILIES = (*_QWEN, "InternVLProcessor", "Gemma3Processor", *_SOUNDS)
_HOST = re.compile(r"([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]+)?")
_ADDED = ("audios_key", "max_samples", "long_sounds", "videos_key", "max_frames", "video")
_FILES = ("processor_config.json", "preprocessor_config.json")
_VIDEO_FILE = "video_preprocessor_config.json"
_TOKENS_PER_SECOND = 4
"""Of models of Qwen2.5-VL whose files do not say it, as transformers has it."""


class Processor(Description, frozen=True):
    """A processor of transformers, which makes pixels of the pictures and videos of a row, or features of its sounds.

    Pictures are read by Pillow and prepared by the processor's own classes for it, without torchvision. They are
    turned as their EXIF orientation says. A plan reads their headers only. Videos are read by PyAV, turned as they say,
    and prepared by the processor's video processor, which needs torch and torchvision; only frames that it chooses are
    decoded.

    Sounds are read by soundfile, mixed to one channel, and converted by soxr to the rate of the processor, rounded up
    to whole samples, as transformers does. Each is processed alone.

    :ivar folder: a folder with ``preprocessor_config.json`` or ``processor_config.json``; None: the tokenizer's.
    :ivar images_key: the key of a row's pictures, for the places in its chat that name none. With ``images``, the
        default, ``image`` is read, too.
    :ivar videos_key: the same for videos, with ``videos`` and ``video``; ``audios_key``: for sounds.
    :ivar media_root: the folder in which all media that are files must be; None: paths may lead anywhere.
    :ivar allowed_hosts: the web servers from which media are fetched: ``"host"`` for the port of http or https,
        ``"host:8080"`` for another. There are no patterns, and redirections lead to these hosts only.
    :ivar timeout_s: of one medium of a web server, all tries together.
    :ivar dtype: of the pixels or features: float32, float16 or bfloat16.
    :ivar max_bytes: of the file of a picture, and of a video that is held in memory; ``max_pixels``: of a picture, or a
        frame, as its header says.
    :ivar max_aspect: the longer side of a picture over the shorter one.
    :ivar max_pictures: of a row, videos among them; so many sounds, too.
    :ivar max_frames: of a video, which the processor chooses.
    :ivar video: settings of the video processor before those of its files, such as
        ``{"do_sample_frames": True, "fps": 2, "max_frames": 64}``.
    :ivar max_samples: of a sound, of all its channels, as far as they are used.
    :ivar long_sounds: a sound of which the processor would use only the beginning, such as 30 s, makes a bad row
        (``refuse``); or it is ``cut``, as the processor alone does without a word, and counted as ``sound_cut``.
    :raises ConfigError: for a value of the wrong type or out of range.
    """

    folder: str | None = None
    images_key: Annotated[str, msgspec.Meta(min_length=1)] = "images"
    videos_key: Annotated[str, msgspec.Meta(min_length=1)] = "videos"
    audios_key: Annotated[str, msgspec.Meta(min_length=1)] = "audios"
    media_root: str | None = None
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    max_bytes: Positive = 64 * 1024 * 1024
    max_pixels: Positive = 64 * 1024 * 1024
    max_aspect: Positive = 200
    max_pictures: Positive = 64
    max_frames: Positive = 768
    video: dict[str, Any] = {}
    max_samples: Positive = 128 * 1024 * 1024
    long_sounds: Literal["refuse", "cut"] = "refuse"
    allowed_hosts: tuple[str, ...] = ()
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 20.0

    def check(self) -> None:
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host):
                raise ConfigError(
                    f"AD457 allowed_hosts has {host!r}; it takes hosts in lower case, as 'host' or 'host:8080', "
                    "without scheme, path and patterns"
                )

    def keys(self, kinds: Collection[str], ignored: Collection[str]) -> dict[str, str]:
        """``{field: key}`` of what a row may have beside its chat, by two names for each of these kinds."""
        found = {}
        for kind in kinds:
            many = f"{kind}s"
            found[many] = self.key_of(kind)
            if found[many] == many and kind not in ignored:
                found[kind] = kind
        return found

    def key_of(self, kind: str) -> str:
        """The key of a row's media of this kind."""
        return str(getattr(self, f"{kind}s_key", f"{kind}s"))

    def config(self, tokenizer: str, revision: str | None) -> ProcessorConfig:
        """What the files of the processor say.

        :param tokenizer: the folder or name of the tokenizer, with its revision on the hub.
        :raises ConfigError: AD457, if there are none, or they are of a processor whose plan is not known.
        """
        return ProcessorConfig(self.folder or resolve(tokenizer, revision).folder)

    def columns(self, tokenizer: str, revision: str | None) -> tuple[Column, ...]:
        """What samples have beside their tokens."""
        return self.config(tokenizer, revision).columns(self.dtype)

    def unset(self) -> list[str]:
        """The settings that were added later, and are their defaults: they are not in fingerprints."""
        return [name for name in _ADDED if getattr(self, name) == getattr(Processor(), name)]

    def named(self, tokenizer: str, revision: str | None) -> Processor:
        """The same, named by what its files say, and not by where they are."""
        name = self.config(tokenizer, revision).digest()
        return msgspec.structs.replace(self, folder=name, media_root=None, timeout_s=1.0)


def processor_of(given: Any) -> Processor:
    """A processor, from its folder or its settings.

    :raises ConfigError: if it is neither.
    """
    if isinstance(given, Processor):
        return given

    if isinstance(given, str | os.PathLike):
        return Processor(folder=os.fspath(given))

    if isinstance(given, dict):
        return Processor(**given)

    raise ConfigError(f"processor is the folder of a processor, or a Processor(...); got {given!r:.100}")


class ProcessorConfig:
    """The files of a processor.

    :ivar family: the name of its class.
    :ivar images: the settings of its image processor; ``videos``: of its video processor, which files of Qwen2.5-VL
        have together; ``sounds``: of its extractor of features; ``other``: its own.
    """

    def __init__(self, folder: str) -> None:
        found = {name: _read(os.path.join(folder, name)) for name in _FILES}
        own, images = (found[name] for name in _FILES)
        if own is None and images is None:
            raise ConfigError(
                f"AD457 there is neither {' nor '.join(_FILES)} in {folder}; Processor(folder=...) names it"
            )

        self.folder, self.other = folder, own or {}
        self.images: dict[str, Any] = images or self.other.get("image_processor", {})
        self.sounds: dict[str, Any] = images or self.other.get("feature_extractor", {})
        self.family = str(self.other.get("processor_class") or self.images.get("processor_class"))
        if self.family not in _FAMILIES:
            raise ConfigError(
                f"AD457 {folder} is of {self.family}, whose tokens cannot be told from headers; there are "
                f"{', '.join(_FAMILIES)}. For others write a function of two phases (docs/how-to/columns.md)"
            )

        videos = self.other.get("video_processor") or _read(os.path.join(folder, _VIDEO_FILE))
        self.videos: dict[str, Any] = videos or (images if images and self.family in _QWEN else {})
        if self.images.get("do_pan_and_scan"):
            raise ConfigError(
                "AD457 do_pan_and_scan=True makes crops whose number is not known from sizes; switch it off"
            )

        if dither := self.sounds.get("dither"):
            raise ConfigError(
                f"AD457 dither={dither} makes other features of a sound each time; set it to 0 in {folder}"
            )

    @property
    def is_qwen(self) -> bool:
        """Whether pixels are patches with a grid, and tokens have three positions."""
        return self.family in _QWEN

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of media that it takes."""
        if self.family in _SOUNDS:
            return ("audio",)

        return ("image", "video") if self.videos and self.family != "Gemma3Processor" else ("image",)

    @cached_property
    def tokens_per_second(self) -> int:
        """Positions of Qwen2.5-VL for a second of a video; 1 for other families, whose positions count patches."""
        if self.family != "Qwen2_5_VLProcessor":
            return 1

        model = _read(os.path.join(self.folder, "config.json"))
        if model is None:
            raise ConfigError(
                f"AD457 there is no config.json in {self.folder}: positions of Qwen2.5-VL's videos depend on its "
                "vision_config.tokens_per_second; copy the model's file to the processor's"
            )

        return int(model.get("vision_config", {}).get("tokens_per_second", _TOKENS_PER_SECOND))

    @property
    def types_name(self) -> str:
        """The column that says which tokens are of media; empty if the model takes none."""
        return _TYPES.get(self.family, "mm_token_type_ids")

    @property
    def mask_name(self) -> str:
        """The column that says which frames are of a sound, and no padding."""
        return _SOUNDS[self.family]

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """Of one value of ``pixel_values``: a patch, a tile or a picture."""
        if self.is_qwen:
            patch, times = self.images.get("patch_size", 14), self.images.get("temporal_patch_size", 2)
            return (3 * times * patch * patch,)

        size = self.images["size"]
        return (3, size["height"], size["width"])

    def columns(self, dtype: str) -> tuple[Column, ...]:
        """What samples have beside their tokens."""
        from asyncdata.core.columns import Column

        if self.family not in _SOUNDS:
            columns = [Column("pixel_values", dtype, "item", self.pixel_shape, phase="load")]
        elif self.family.startswith("Qwen"):  # all have as many frames
            size, seconds = self.sounds.get("feature_size", 80), self.sounds.get("chunk_length", 30)
            num_frames = seconds * self.sounds.get("sampling_rate", 16_000) // self.sounds.get("hop_length", 160)
            columns = [
                Column(FEATURES, dtype, "item", (size, num_frames), phase="load"),
                Column(self.mask_name, "int32", "item", (num_frames,), phase="load"),
            ]
        else:
            columns = [
                Column(FEATURES, dtype, "item", (self.sounds.get("feature_size", 128),), phase="load"),
                Column(self.mask_name, "bool", "item", phase="load"),
                Column(NUM_FRAMES, "int64", "item"),
            ]
        if self.types_name:
            columns.append(Column(self.types_name, "int64"))
        if self.is_qwen:
            columns.append(Column(GRID, "int64", "item", (3,)))
        if self.is_qwen or self.family == _OMNI:
            columns.append(Column(MROPE, "int64", shape=(3,)))
        if self.is_qwen and "video" in self.kinds:
            patch = self.videos.get("patch_size", self.images.get("patch_size", 14))
            values = 3 * self.videos.get("temporal_patch_size", 2) * patch * patch
            columns += [
                Column(VIDEO_PIXELS, dtype, "item", (values,), phase="load"),
                Column(VIDEO_GRID, "int64", "item", (3,)),
            ]
            if self.family == "Qwen2_5_VLProcessor":
                columns.append(Column(SECONDS, "float32", "item"))
        return tuple(columns)

    def digest(self) -> str:
        """Of what the files say."""
        videos = [self.videos, self.tokens_per_second, RULE] if "video" in self.kinds else []
        return digest(self.family, canonical([self.images, self.other, *videos]))


def _read(path: str) -> dict[str, Any] | None:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"AD457 {path} cannot be read: {error}") from error

    return found if isinstance(found, dict) else {}
