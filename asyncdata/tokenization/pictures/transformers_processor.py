"""A processor of transformers, opened: texts and columns from headers, pixels and features from media."""

from __future__ import annotations

import copy
import inspect
import json
import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from asyncdata.core.columns import FRAMES, Column
from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import missing_package
from asyncdata.tokenization.pictures.files import Medium, size_of, turned
from asyncdata.tokenization.pictures.settings import (
    FEATURES,
    GRID,
    MROPE,
    NUM_FRAMES,
    SECONDS,
    VIDEO_GRID,
    VIDEO_PIXELS,
    Processor,
    ProcessorConfig,
)
from asyncdata.tokenization.pictures.sounds import Wanted, length_of, load_packages, samples_of
from asyncdata.tokenization.pictures.torch_frames import frames_without_data, tensor_of
from asyncdata.tokenization.pictures.videos import Header, frames_of, header_of
from asyncdata.tokenization.rows import RowFault

_SAMPLE = 'video={"do_sample_frames": True, "fps": ...}'
_OTHER_RATE = 'Processor(video={"fps": ...}) sets another rate'
_KEPT = 4096

SOUND_CUT = "sound_cut"
"""The note of a sound of which the processor uses only the beginning."""

Array = np.ndarray[Any, np.dtype[Any]]


class Planned(NamedTuple):
    """What is known of a medium from its header.

    :ivar text: what stands for it in the tokenized text.
    :ivar counts: how many values of each column of the phase ``load`` it has.
    :ivar grid: for Qwen: patches in time, height and width.
    :ivar of: what else its kind needs to load it.
    :ivar notes: of its row.
    """

    medium: Medium
    text: str
    counts: dict[str, int]
    grid: tuple[int, int, int] | None = None
    notes: tuple[str, ...] = ()
    of: Any = None


class Kind(ABC):
    """What a processor does with media of one kind.

    :ivar mark: what a template writes for one.
    :ivar token: the text of the token that stands for a part of one; ``number``: what that token has in the column of
        types.
    """

    mark: str
    token: str
    number: int

    @abstractmethod
    def plan(self, medium: Medium) -> Planned:
        """What follows from the header of a medium.

        :raises RowFault: if it cannot be read, or is beyond a limit.
        """

    def axes(self, planned: Planned) -> list[tuple[tuple[int, ...], float]]:
        """For Qwen: the grids of a medium's runs of tokens, and how many positions of time a patch of each takes.

        The tokens of what has no grid are counted as those of text.
        """
        return [] if planned.grid is None else [(planned.grid, 1.0)]

    def shown(self, planned: Planned) -> tuple[Any, str]:
        """A picture of a medium, as Pillow has it, and its size in words; None: it has none.

        :raises RowFault: as :meth:`load`.
        """
        return None, ""

    @abstractmethod
    def light(self, planned: Sequence[Planned]) -> dict[str, Array]:
        """The columns of the plan for the media of a row that are of this kind, or for none, by name."""

    @abstractmethod
    def load(self, planned: Planned) -> dict[str, Array]:
        """The columns of the phase ``load`` for one medium, by name.

        :raises RowFault: if it cannot be decoded, or is another than by its header.
        """


@contextmanager
def refused(medium: Medium, what: str) -> Iterator[None]:
    """What a processor raises for a medium, such as a sound that is too short for it, is the row's."""
    try:
        yield
    except (ValueError, TypeError, IndexError, ZeroDivisionError, RuntimeError) as error:
        place = f"{medium.name} ({medium.path or 'bytes of the row'})"
        raise RowFault("AD457", f"{place}: its processor refuses {what}: {error!s:.300}") from None


class Pictures(Kind):
    """Pictures, by the image processor of Pillow."""

    number = 1

    def __init__(self, settings: Processor, config: ProcessorConfig, processor: Any) -> None:
        self._settings, self._config, self._processor = settings, config, processor
        self._images = processor.image_processor
        self.mark = processor.image_token
        of_part = processor.tokenizer if config.family == "Gemma3Processor" else processor
        self.token = of_part.image_token

    def plan(self, medium: Medium) -> Planned:
        size = size_of(medium, self._settings)
        grid, inputs = None, dict[str, Any]()
        if self._config.is_qwen:
            grid = self._grid(*size)
            count, inputs[GRID] = math.prod(grid), np.array([grid], np.int64)
        elif self._config.family == "Gemma3Processor":
            count, inputs["num_crops"] = 1, [0]
        else:
            count = self._images.get_number_of_image_patches(*size, {})
            inputs["num_patches"] = [count]
        return Planned(medium, self._processor.replace_image_token(inputs, 0), {"pixel_values": count}, grid)

    def light(self, planned: Sequence[Planned]) -> dict[str, Array]:
        return {GRID: _grids(planned)} if self._config.is_qwen else {}

    def load(self, planned: Planned) -> dict[str, Array]:
        image = turned(planned.medium, self._settings)
        found = self._images(images=[image], return_tensors="np")
        values = found["pixel_values"]
        is_same = planned.grid is None or found[GRID].tolist() == [[*planned.grid]]
        if len(values) != planned.counts["pixel_values"] or not is_same:
            raise RowFault("AD457", f"{planned.medium.name} has the size {image.size}, and had another by its header")

        return {"pixel_values": values}

    def shown(self, planned: Planned) -> tuple[Any, str]:
        image = turned(planned.medium, self._settings)
        return image, f"{image.width} x {image.height} pixels"

    def _grid(self, height: int, width: int) -> tuple[int, int, int]:
        """The patches of a picture, as the image processor will cut them."""
        images = self._images
        resize = sys.modules[type(images).__module__].smart_resize
        low, high = images.size["shortest_edge"], images.size["longest_edge"]
        side = images.patch_size * images.merge_size
        rows, columns = resize(height, width, side, min_pixels=low, max_pixels=high)
        return 1, rows // images.patch_size, columns // images.patch_size


class Videos(Kind):
    """Videos, by the video processor, which is loaded for the first of them.

    A plan runs it on a tensor without data: what it needs of frames is their number and size.
    """

    number = 2

    def __init__(self, settings: Processor, config: ProcessorConfig, processor: Any) -> None:
        self._settings, self._config, self._processor = settings, config, processor
        self.mark = processor.video_token
        self.token = processor.video_token if config.is_qwen else processor.image_token
        self._pixels = VIDEO_PIXELS if config.is_qwen else "pixel_values"

    @cached_property
    def _videos(self) -> Any:
        made = _made_for_videos(self._config.folder, self._settings.video)
        self._processor.video_processor = made
        return made

    def plan(self, medium: Medium) -> Planned:
        header = header_of(medium, self._settings)
        if header.times and self._config.family != "Qwen3VLProcessor":
            reason = "has 'frames_timestamp', and its model takes no times of frames: leave it out"
            raise RowFault("AD457", f"{medium.name} {reason}")

        _ = self._videos  # it says what is missing
        ghost = frames_without_data(header.num_frames, header.height, header.width)
        inputs = self._run(medium, header, ghost, **({"do_sample_frames": False} if header.frames else {}))
        about = inputs["video_metadata"][0]
        indices = [int(index) for index in (range(header.num_frames) if header.frames else about.frames_indices)]
        wrong = [index for index in indices if not 0 <= index < header.num_frames]
        if wrong or not indices:
            which = f"frame {wrong[0]} of" if wrong else "none of"
            raise RowFault("AD457", f"{medium.name}: its processor asks for {which} {header.num_frames}; {_OTHER_RATE}")

        if len(indices) > self._settings.max_frames:
            reason = f"has {len(indices)} frames to load, more than max_frames={self._settings.max_frames}"
            raise RowFault("AD457", f"{medium.name} {reason}; Processor({_SAMPLE}) takes fewer")

        values = inputs["pixel_values_videos"]
        shape = tuple((values if self._config.is_qwen else values[0]).shape)
        wanted = next(one.shape for one in self._config.columns("float32") if one.name == self._pixels)
        if shape[1:] != wanted:
            raise ConfigError(
                f"AD457 the video processor makes values of {shape[1:]}, and those of its model are {wanted}"
            )

        num_bytes = len(indices) * header.height * header.width * 3
        counts = {self._pixels: shape[0], FRAMES: 2 * num_bytes}
        grid = tuple(inputs[VIDEO_GRID][0].tolist()) if self._config.is_qwen else None
        seconds = self._videos.temporal_patch_size / about.sampled_fps if grid else 0
        text = self._processor.replace_video_token(inputs, 0)
        return Planned(medium, text, counts, grid, of=(header, indices, seconds))

    def _run(self, medium: Medium, header: Header, frames: Any, **settings: Any) -> Any:
        from transformers.video_utils import VideoMetadata

        about = VideoMetadata(
            total_num_frames=header.num_frames,
            fps=1.0 if header.times else header.fps,
            height=header.height,
            width=header.width,
            frames_indices=np.array(header.times) if header.times else np.arange(header.num_frames),
        )
        processor = self._videos
        what = f"{header.num_frames} frames of {header.width} x {header.height}, {header.fps:g} a second"
        with refused(medium, what):
            return processor(
                videos=[frames], video_metadata=[about], return_metadata=True, return_tensors="pt", **settings
            )

    def axes(self, planned: Planned) -> list[tuple[tuple[int, ...], float]]:
        assert planned.grid is not None
        times, *sides = planned.grid
        if self._config.family == "Qwen3VLProcessor":  # the time of each is in the text
            return [((1, *sides), 1.0)] * times

        is_timed = self._config.family == "Qwen2_5_VLProcessor"
        step = np.float32(planned.of[2]) * np.float32(self._config.tokens_per_second) if is_timed else 1.0
        return [(planned.grid, float(step))]

    def light(self, planned: Sequence[Planned]) -> dict[str, Array]:
        if not self._config.is_qwen:
            return {}

        timed = {SECONDS: np.array([each.of[2] for each in planned], np.float32)}
        return {VIDEO_GRID: _grids(planned), **(timed if self._config.family == "Qwen2_5_VLProcessor" else {})}

    def load(self, planned: Planned) -> dict[str, Array]:
        header, indices, _ = planned.of
        frames = tensor_of(frames_of(planned.medium, header, indices, self._settings))
        found = self._run(planned.medium, header._replace(num_frames=len(indices)), frames, do_sample_frames=False)
        values = found["pixel_values_videos"]
        values = values if self._config.is_qwen else values[0]
        grid = found[VIDEO_GRID][0].tolist() if self._config.is_qwen else None
        if len(values) != planned.counts[self._pixels] or (grid and tuple(grid) != planned.grid):
            raise RowFault("AD457", f"{planned.medium.name} has other frames than by its header")

        return {self._pixels: values.numpy()}

    def shown(self, planned: Planned) -> tuple[Any, str]:
        from PIL import Image

        header, indices, _ = planned.of
        (first,) = frames_of(planned.medium, header, indices[:1], self._settings)
        words = f"{len(indices)} of {header.num_frames} frames, {header.width} x {header.height} pixels"
        return Image.fromarray(first), words


class Sounds(Kind):
    """Sounds, each alone. A plan calls the processor with silence, without its spectra.

    :raises ConfigError: if a package is missing.
    """

    number = 3

    def __init__(self, settings: Processor, config: ProcessorConfig, processor: Any) -> None:
        load_packages()
        self._settings, self._names, self._processor = settings, (FEATURES, config.mask_name), processor
        self.mark = self.token = processor.audio_token
        extractor = processor.feature_extractor
        most = getattr(extractor, "n_samples", None) or inspect.signature(extractor).parameters["max_length"].default
        self._wanted = Wanted(extractor.sampling_rate, most)
        self._shapes = {column.name: column.shape for column in config.columns(settings.dtype)}
        self._silent, self._of_length = _silent(processor), lru_cache(_KEPT)(self._planned)

    def plan(self, medium: Medium) -> Planned:
        length, num_bytes = length_of(medium, self._wanted, self._settings)
        with refused(medium, "it"):
            text, number = self._of_length(min(length, self._wanted.most))
        counts = {**dict.fromkeys(self._names, number), FRAMES: num_bytes}
        return Planned(medium, text, counts, notes=(SOUND_CUT,) if length > self._wanted.most else ())

    def _planned(self, length: int) -> tuple[str, int]:
        """The text, and the number of values of both columns, of so many samples."""
        found = self._called(self._silent, np.zeros(length, np.float32), return_text_replacement_offsets=True)
        (replaced,) = found["text_replacement_offsets"][0]
        return replaced["replacement"], len(found[FEATURES][0]) if NUM_FRAMES in self._shapes else 1

    def light(self, planned: Sequence[Planned]) -> dict[str, Array]:
        frames = np.array([each.counts[FEATURES] for each in planned], np.int64)
        return {NUM_FRAMES: frames} if NUM_FRAMES in self._shapes else {}

    def load(self, planned: Planned) -> dict[str, Array]:
        samples = samples_of(planned.medium, self._wanted, self._settings)
        with refused(planned.medium, "it"):
            found = self._called(self._processor, samples, return_tensors="np")
        return {name: found[name].reshape(-1, *self._shapes[name]) for name in self._names}

    def _called(self, processor: Any, samples: Array, **more: Any) -> Any:
        text = [processor.audio_token]
        return processor(text=text, audio=[samples], sampling_rate=self._wanted.rate, **more)


def _silent(processor: Any) -> Any:
    """The processor without its spectra: shapes and masks are its own, and features are nothing."""
    silent = copy.copy(processor)
    silent.feature_extractor = extractor = copy.copy(processor.feature_extractor)
    if hasattr(extractor, "nb_max_frames"):  # Whisper's

        def nothing(waves: Array, device: str = "cpu") -> Array:
            shape = len(waves), extractor.feature_size, waves.shape[1] // extractor.hop_length
            return np.broadcast_to(np.float32(0), shape)

        for package in ("torch", "np"):
            setattr(extractor, f"_{package}_extract_fbank_features", nothing)
    else:  # Gemma's: of spectra of two numbers
        extractor.fft_length, extractor.mel_filters = 2, np.zeros((2, extractor.feature_size), np.float32)
    return silent


class OpenProcessor:
    """See :class:`~asyncdata.Processor`.

    :ivar kinds: of media that it takes.
    """

    def __init__(self, settings: Processor, config: ProcessorConfig) -> None:
        self._config = config
        processor = _made(config)
        self.kinds: dict[str, Kind] = {}
        for name, kind in (("image", Pictures), ("video", Videos), ("audio", Sounds)):
            if name in config.kinds:
                self.kinds[name] = kind(settings, config, processor)
        self._columns: dict[str, Column] = {column.name: column for column in config.columns(settings.dtype)}
        self._merge = int(getattr(getattr(processor, "image_processor", None), "merge_size", 1))
        ids = processor.tokenizer.convert_tokens_to_ids
        self._numbers = {ids(kind.token): kind.number for kind in self.kinds.values()}

    @property
    def marks(self) -> dict[str, str]:
        """What a template writes for a medium of each kind."""
        return {name: kind.mark for name, kind in self.kinds.items()}

    @property
    def light_keys(self) -> list[str]:
        """The keys of the columns that a plan has."""
        return [column.key for column in self._columns.values() if column.phase == "plan"]

    def plan(self, media: Sequence[Medium]) -> list[Planned]:
        """What follows from the media's headers.

        :raises RowFault: if one of them cannot be read, or is beyond a limit.
        """
        return [self.kinds[medium.kind].plan(medium) for medium in media]

    def num_tokens(self, planned: Planned) -> int:
        """The tokens that stand for a medium."""
        return planned.text.count(self.kinds[planned.medium.kind].token)

    def light(self, tokens: Sequence[int], planned: Sequence[Planned]) -> dict[str, bytes]:
        """The columns of the plan, by their keys."""
        ids = np.asarray(tokens, np.int64)
        types = np.zeros(len(ids), np.int64)
        for token, number in self._numbers.items():
            types[ids == token] = number
        values: dict[str, Array] = {self._config.types_name: types} if self._config.types_name else {}
        values |= self._light(planned)
        if MROPE in self._columns:
            runs = [run for each in planned for run in self.kinds[each.medium.kind].axes(each)]
            values[MROPE] = mrope(types, runs, self._merge)
        columns = {
            self._columns[name].key: self._columns[name].encode(array, len(types)) for name, array in values.items()
        }
        if planned:
            counts: Counter[str] = Counter()
            for each in planned:
                counts.update(each.counts)
            columns["media"] = json.dumps(counts).encode()
        return columns

    def _light(self, planned: Sequence[Planned]) -> dict[str, Array]:
        found = dict[str, Array]()
        for name, kind in self.kinds.items():
            found |= kind.light([each for each in planned if each.medium.kind == name])
        return found

    def load(self, planned: Sequence[Planned]) -> dict[str, bytes]:
        """The columns of the phase ``load``, by their keys; and those that are compared with the plan's.

        :raises RowFault: if a medium cannot be decoded, or is another than by its header.
        """
        pieces: dict[str, list[Array]] = {}
        for each in planned:
            for name, array in self.kinds[each.medium.kind].load(each).items():
                pieces.setdefault(name, []).append(array)
        loaded = {name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for name, arrays in pieces.items()}
        found = self._light(planned) | loaded
        return {self._columns[name].key: self._columns[name].encode(array, 0) for name, array in found.items()}


def _grids(planned: Sequence[Planned]) -> Array:
    """int64 of shape (number of media, 3)."""
    return np.array([each.grid for each in planned], np.int64).reshape(-1, 3)


def _made(config: ProcessorConfig) -> Any:
    """The processor, without parts for media that it does not read, or for videos: they would need torchvision."""
    is_heard = "audio" in config.kinds
    try:
        import transformers

        made: Any = getattr(transformers, config.family)
        if is_heard:
            part = {"feature_extractor": transformers.AutoFeatureExtractor.from_pretrained(config.folder)}
        elif tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 5):  # they have no processors for Pillow
            raise ImportError(f"version {transformers.__version__} is installed")
        else:
            part = {"image_processor": transformers.AutoImageProcessor.from_pretrained(config.folder, backend="pil")}
    except (ImportError, AttributeError) as error:  # of many versions, that of pictures needs torchvision
        packages = "'transformers>=5.24'" + " pillow" * (not is_heard)
        raise missing_package(config.family, packages, ImportError(str(error))) from error

    takes = inspect.signature(made.__init__).parameters
    settings = {name: value for name, value in config.other.items() if name in takes}
    settings |= dict.fromkeys({"image_processor", "video_processor"} & {*takes}) | part

    class Assembled(made):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    return Assembled(**settings | {"tokenizer": transformers.AutoTokenizer.from_pretrained(config.folder)})


def _made_for_videos(folder: str, settings: Mapping[str, Any]) -> Any:
    """The video processor, with settings of the user's."""
    try:
        import torchvision  # noqa: F401
        from transformers import AutoVideoProcessor
    except (ImportError, RuntimeError) as error:  # the latter: another torch than torchvision was built for
        raise missing_package("a processor of videos", "torch torchvision", ImportError(str(error))) from error

    try:
        made: Any = AutoVideoProcessor.from_pretrained(folder, **settings)
    except (ValueError, OSError, TypeError) as error:
        raise ConfigError(f"AD457 the video processor in {folder} cannot be loaded: {error!s:.300}") from error

    if unknown := sorted(settings.keys() - made.valid_kwargs.__annotations__.keys()):
        raise ConfigError(
            f"AD457 Processor(video=...) has {', '.join(unknown)}, which {type(made).__name__} does not take"
        )

    if getattr(made, "cap_pixels_per_frame", False) is None:
        made.cap_pixels_per_frame = False  # which it means, with a warning
    return made


def mrope(types: Array, runs: Iterable[tuple[Any, float]], merge: int) -> Array:
    """Positions of tokens in time, height and width, as Qwen's models count them: int64 of shape (num_tokens, 3).

    Text has one number in all three. A picture's tokens have their place in its grid, and the text after it goes on
    after the largest of them (Qwen2-VL, https://arxiv.org/abs/2409.12191, section 2.1).

    :param types: int64 of shape (num_tokens,): not 0 for the tokens of media.
    :param runs: for each picture, its patches in time, height and width, and the positions that a patch takes in time.
    :param merge: patches a token, in both directions.
    """
    found, place, start = np.empty((len(types), 3), np.int64), 0, 0
    for grid, step in runs:
        first = start + int(np.argmax(types[start:] > 0))
        found[start:first] = np.arange(place, place + first - start)[:, None]
        place += first - start
        times, height, width = np.asarray(grid) // [1, merge, merge]
        stop = first + int(times * height * width)
        moments = (np.arange(times, dtype=np.float32) * np.float32(step)).astype(np.int64)  # as torch rounds it
        axes = np.meshgrid(moments, np.arange(height), np.arange(width), indexing="ij")
        found[first:stop] = np.stack(axes, -1).reshape(-1, 3) + place
        place, start = place + int(max(height, width)), stop
    found[start:] = np.arange(place, place + len(types) - start)[:, None]
    return found
