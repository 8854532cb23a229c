"""A processor of transformers, opened: texts and columns from the headers of media, and pixels from media."""

from __future__ import annotations

import inspect
import json
import math
import sys
from abc import ABC, abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.imports import missing_package
from asyncdata.tokenization.pictures.files import Medium, size_of, turned
from asyncdata.tokenization.pictures.settings import GRID, MROPE, Processor, ProcessorConfig
from asyncdata.tokenization.pictures.transformers_sounds import OpenSounds, processor_of_sounds
from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.columns import Column

Array = np.ndarray[Any, np.dtype[Any]]


class Planned(NamedTuple):
    """What is known of a medium from its header.

    :ivar text: what stands for it in the tokenized text.
    :ivar counts: how many values of each column of the phase ``load`` it has.
    :ivar grid: for Qwen: patches in time, height and width.
    :ivar notes: of its row.
    """

    medium: Medium
    text: str
    counts: dict[str, int]
    grid: tuple[int, int, int] | None = None
    notes: tuple[str, ...] = ()


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

    @abstractmethod
    def light(self, planned: Sequence[Planned]) -> dict[str, Array]:
        """The columns of the plan for the media of a row that are of this kind, or for none, by name."""

    @abstractmethod
    def load(self, planned: Planned) -> dict[str, Array]:
        """The columns of the phase ``load`` for one medium, by name.

        :raises RowFault: if it cannot be decoded, or is another than by its header.
        """


class Sounds(Kind):
    """Sounds, each alone."""

    number = 3

    def __init__(self, settings: Processor, config: ProcessorConfig, processor: Any) -> None:
        self._sounds = OpenSounds(settings, config, processor)
        self.mark = self.token = processor.audio_token

    def plan(self, medium: Medium) -> Planned:
        found = self._sounds.plan(medium)
        return Planned(medium, found.text, found.counts, notes=found.notes)

    def light(self, planned: Sequence[Planned]) -> dict[str, Array]:
        return self._sounds.light([each.counts for each in planned])

    def load(self, planned: Planned) -> dict[str, Array]:
        return self._sounds.load(planned.medium)


class Pictures(Kind):
    """Pictures, by the image processor of Pillow."""

    number = 1

    def __init__(self, settings: Processor, config: ProcessorConfig, processor: Any) -> None:
        self._settings, self._config, self._processor = settings, config, processor
        self._images = processor.image_processor
        self.mark = processor.image_token
        self.token = _pictured_token(processor, config)

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

    def _grid(self, height: int, width: int) -> tuple[int, int, int]:
        """The patches of a picture, as the image processor will cut them."""
        images = self._images
        resize = sys.modules[type(images).__module__].smart_resize
        low, high = images.size["shortest_edge"], images.size["longest_edge"]
        side = images.patch_size * images.merge_size
        rows, columns = resize(height, width, side, min_pixels=low, max_pixels=high)
        return 1, rows // images.patch_size, columns // images.patch_size


class OpenProcessor:
    """See :class:`~asyncdata.Processor`.

    :ivar kinds: of media that it takes.
    """

    def __init__(self, settings: Processor, config: ProcessorConfig) -> None:
        self._config = config
        processor = _made(config)
        self.kinds: dict[str, Kind] = {}
        if "image" in config.kinds:
            self.kinds["image"] = Pictures(settings, config, processor)
        if "audio" in config.kinds:
            self.kinds["audio"] = Sounds(settings, config, processor)
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
        if self._config.is_qwen:
            values[MROPE] = mrope(types, _grids(planned), self._merge)
        elif MROPE in self._columns:  # sounds are counted as text is
            values[MROPE] = mrope(types, _grids([]), self._merge)
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
    """The processor, without what it has for videos, which would need torchvision."""
    if "audio" in config.kinds:
        return processor_of_sounds(config)

    try:
        import transformers

        if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 5):  # they have no processors for Pillow
            raise ImportError(f"version {transformers.__version__} is installed")
        images = transformers.AutoImageProcessor.from_pretrained(config.folder, backend="pil")
    except ImportError as error:  # of many versions it needs torchvision
        raise missing_package("a processor of pictures", "'transformers>=5.24' pillow", error) from error

    made: Any = getattr(transformers, config.family)
    takes = inspect.signature(made.__init__).parameters
    settings = {name: value for name, value in config.other.items() if name in takes and name != "image_processor"}

    class WithoutVideos(made):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    return WithoutVideos(
        image_processor=images,
        tokenizer=transformers.AutoTokenizer.from_pretrained(config.folder),
        **settings,
    )


def _pictured_token(processor: Any, config: ProcessorConfig) -> str:
    """The token that stands for a part of a picture."""
    return str(processor.tokenizer.image_token if config.family == "Gemma3Processor" else processor.image_token)


def mrope(types: Array, grids: Array, merge: int) -> Array:
    """Positions of tokens in time, height and width, as Qwen's models count them: int64 of shape (num_tokens, 3).

    Text has one number in all three. A picture's tokens have their place in its grid, and the text after it goes on
    after the largest of them (Qwen2-VL, https://arxiv.org/abs/2409.12191, section 2.1).

    :param types: int64 of shape (num_tokens,): not 0 for the tokens of media.
    :param grids: patches of each picture in time, height and width; ``merge``: patches a token, in both directions.
    """
    found, place, start = np.empty((len(types), 3), np.int64), 0, 0
    for grid in grids:
        first = start + int(np.argmax(types[start:] > 0))
        found[start:first] = np.arange(place, place + first - start)[:, None]
        place += first - start
        times, height, width = grid // [1, merge, merge]
        stop = first + int(times * height * width)
        axes = np.meshgrid(np.arange(times), np.arange(height), np.arange(width), indexing="ij")
        found[first:stop] = np.stack(axes, -1).reshape(-1, 3) + place
        place, start = place + int(max(height, width)), stop
    found[start:] = np.arange(place, place + len(types) - start)[:, None]
    return found
