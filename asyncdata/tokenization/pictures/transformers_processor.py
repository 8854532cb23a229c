"""A processor of transformers, opened: texts and columns from sizes of pictures, and pixels from pictures."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.imports import missing_package
from asyncdata.tokenization.pictures.files import Picture, size_of, turned
from asyncdata.tokenization.pictures.settings import GRID, MROPE, Processor, ProcessorConfig
from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.core.columns import Column

Array = np.ndarray[Any, np.dtype[Any]]


class Planned(NamedTuple):
    """What is known of the pictures of a row from their sizes.

    :ivar texts: what stands for each of them in the tokenized text.
    :ivar counts: how many values of ``pixel_values`` each has.
    :ivar grids: int64 of shape (num_pictures, 3), for Qwen: patches in time, height and width.
    """

    pictures: Sequence[Picture]
    texts: list[str]
    counts: list[int]
    grids: Array | None


class OpenProcessor:
    """See :class:`~asyncdata.Processor`.

    :ivar mark: what a template writes for a picture.
    """

    def __init__(self, settings: Processor, config: ProcessorConfig) -> None:
        self._settings, self._config = settings, config
        self._processor = _made(config)
        self._images = self._processor.image_processor
        self.mark: str = self._processor.image_token
        self._columns: dict[str, Column] = {column.name: column for column in config.columns(settings.dtype)}
        self._merge = int(getattr(self._images, "merge_size", 1))
        self._pictured_text = _pictured_token(self._processor, config)
        self._pictured = self._processor.tokenizer.convert_tokens_to_ids(self._pictured_text)

    @property
    def light_keys(self) -> list[str]:
        """The keys of the columns that a plan has."""
        return [column.key for column in self._columns.values() if column.phase == "plan"]

    def plan(self, pictures: Sequence[Picture]) -> Planned:
        """What follows from the pictures' headers.

        :raises RowFault: if one of them cannot be read, or is beyond a limit.
        """
        sizes = [size_of(picture, self._settings) for picture in pictures]
        grids, inputs = None, dict[str, Any]()
        if self._config.is_qwen:
            grids = np.array([self._grid(*size) for size in sizes], np.int64).reshape(-1, 3)
            counts, inputs[GRID] = grids.prod(axis=1).tolist(), grids
        elif self._config.family == "Gemma3Processor":
            counts, inputs["num_crops"] = [1] * len(sizes), [0] * len(sizes)
        else:
            counts = [self._images.get_number_of_image_patches(*size, {}) for size in sizes]
            inputs["num_patches"] = counts
        texts = [self._processor.replace_image_token(inputs, number) for number in range(len(sizes))]
        return Planned(pictures, texts, counts, grids)

    def num_tokens(self, planned: Planned) -> list[int]:
        """The tokens that stand for each picture."""
        return [text.count(self._pictured_text) for text in planned.texts]

    def _grid(self, height: int, width: int) -> tuple[int, int, int]:
        """The patches of a picture, as the image processor will cut them."""
        images = self._images
        resize = sys.modules[type(images).__module__].smart_resize
        low, high = images.size["shortest_edge"], images.size["longest_edge"]
        rows, columns = resize(height, width, images.patch_size * self._merge, min_pixels=low, max_pixels=high)
        return 1, rows // images.patch_size, columns // images.patch_size

    def light(self, tokens: Sequence[int], planned: Planned) -> dict[str, bytes]:
        """The columns of the plan, by their keys."""
        types = (np.asarray(tokens, np.int64) == self._pictured).astype(np.int64)
        values: dict[str, Array] = {self._config.types_name: types} if self._config.types_name else {}
        if planned.grids is not None:
            values |= {GRID: planned.grids, MROPE: mrope(types, planned.grids, self._merge)}
        columns = {
            self._columns[name].key: self._columns[name].encode(array, len(types)) for name, array in values.items()
        }
        if planned.pictures:
            columns["media"] = b'{"pixel_values": %d}' % sum(planned.counts)
        return columns

    def pixels(self, planned: Planned) -> dict[str, bytes]:
        """The column of pixels, by its key; and the column of grids, which is compared with the plan's.

        :raises RowFault: if a picture cannot be decoded, or has another size than by its header.
        """
        column = self._columns["pixel_values"]
        images = [turned(picture, self._settings) for picture in planned.pictures]
        found = self._images(images=images, return_tensors="np")
        values = found["pixel_values"]
        grids = found.get(GRID)
        is_same = planned.grids is None or np.array_equal(grids, planned.grids)
        if len(values) != sum(planned.counts) or not is_same:
            raise RowFault(
                "AD457",
                f"the pictures have the sizes {[image.size for image in images]}, and had others by their headers",
            )

        again = {} if planned.grids is None else {self._columns[GRID]: planned.grids}
        return {column.key: column.encode(array, 0) for column, array in ({column: values} | again).items()}


def _made(config: ProcessorConfig) -> Any:
    """The processor, without what it has for videos, which would need torchvision."""
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

    :param types: int64 of shape (num_tokens,): 1 for the tokens of pictures.
    :param grids: patches of each picture in time, height and width; ``merge``: patches a token, in both directions.
    """
    found, place, start = np.empty((len(types), 3), np.int64), 0, 0
    for grid in grids:
        first = start + int(np.argmax(types[start:]))
        found[start:first] = np.arange(place, place + first - start)[:, None]
        place += first - start
        times, height, width = grid // [1, merge, merge]
        stop = first + int(times * height * width)
        axes = np.meshgrid(np.arange(times), np.arange(height), np.arange(width), indexing="ij")
        found[first:stop] = np.stack(axes, -1).reshape(-1, 3) + place
        place, start = place + int(max(height, width)), stop
    found[start:] = np.arange(place, place + len(types) - start)[:, None]
    return found
