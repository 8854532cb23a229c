"""Sounds, by a processor of transformers: texts and shapes from lengths, and features from samples."""

from __future__ import annotations

import copy
import inspect
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.settings import missing_package
from asyncdata.tokenization.pictures.settings import FEATURES, NUM_FRAMES, Processor, ProcessorConfig
from asyncdata.tokenization.pictures.sounds import Wanted, length_of, load_packages, samples_of
from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.tokenization.pictures.files import Medium

Array = np.ndarray[Any, np.dtype[Any]]

_KEPT = 4096

SOUND_CUT = "sound_cut"
"""The note of a sound of which the processor uses only the beginning."""


class PlannedSound(NamedTuple):
    """What follows from the header of a sound; see ``Planned`` of all media."""

    text: str
    counts: dict[str, int]
    notes: tuple[str, ...]


class OpenSounds:
    """What a processor does with a sound alone. A plan calls it with silence, without its spectra.

    :raises ConfigError: if a package is missing.
    """

    def __init__(self, settings: Processor, config: ProcessorConfig, processor: Any) -> None:
        load_packages()
        self._settings, self._names, self._processor = settings, (FEATURES, config.mask_name), processor
        extractor = processor.feature_extractor
        most = getattr(extractor, "n_samples", None) or _default(extractor, "max_length")
        self._wanted = Wanted(extractor.sampling_rate, most)
        self._shapes = {column.name: column.shape for column in config.columns(settings.dtype)}
        self._silent, self._of_length = _silent(processor), lru_cache(_KEPT)(self._planned)

    def plan(self, sound: Medium) -> PlannedSound:
        """What follows from its header.

        :raises RowFault: if it cannot be read, or is beyond a limit.
        """
        length = length_of(sound, self._wanted, self._settings)
        with _taken(sound):
            text, number = self._of_length(min(length, self._wanted.most))
        return PlannedSound(
            text, dict.fromkeys(self._names, number), (SOUND_CUT,) if length > self._wanted.most else ()
        )

    def _planned(self, length: int) -> tuple[str, int]:
        """The text, and the number of values of both columns, of so many samples."""
        found = self._called(self._silent, np.zeros(length, np.float32), return_text_replacement_offsets=True)
        (replaced,) = found["text_replacement_offsets"][0]
        return replaced["replacement"], len(found[FEATURES][0]) if NUM_FRAMES in self._shapes else 1

    def light(self, counts: Sequence[dict[str, int]]) -> dict[str, Array]:
        """The columns of the plan for the sounds of a row, of which these are the counts."""
        frames = np.array([each[FEATURES] for each in counts], np.int64)
        return {NUM_FRAMES: frames} if NUM_FRAMES in self._shapes else {}

    def load(self, sound: Medium) -> dict[str, Array]:
        """Its features, and their mask.

        :raises RowFault: if it cannot be decoded, or is shorter than by its header.
        """
        samples = samples_of(sound, self._wanted, self._settings)
        with _taken(sound):
            found = self._called(self._processor, samples, return_tensors="np")
        return {name: found[name].reshape(-1, *self._shapes[name]) for name in self._names}

    def _called(self, processor: Any, samples: Array, **more: Any) -> Any:
        text = [processor.audio_token]
        return processor(text=text, audio=[samples], sampling_rate=self._wanted.rate, **more)


@contextmanager
def _taken(sound: Medium) -> Iterator[None]:
    """What the processor raises for a sound, such as one that is too short for it, is the row's."""
    try:
        yield
    except (ValueError, IndexError, ZeroDivisionError) as error:
        raise RowFault(
            "AD457", f"{sound.name} ({sound.path or 'bytes of the row'}) is refused by the processor: {error!r:.200}"
        ) from None


def _default(function: Any, name: str) -> int:
    return int(inspect.signature(function).parameters[name].default)


def processor_of_sounds(config: ProcessorConfig) -> Any:
    """The processor, without what it has for pictures and videos, which would need torchvision.

    :raises ConfigError: if transformers is missing, or has no such processor.
    """
    try:
        import transformers

        made: Any = getattr(transformers, config.family)
        extractor = transformers.AutoFeatureExtractor.from_pretrained(config.folder)
    except (ImportError, AttributeError) as error:
        raise missing_package(config.family, "'transformers>=5.24'", ImportError(str(error))) from error

    others = dict.fromkeys({"image_processor", "video_processor"} & {*inspect.signature(made.__init__).parameters})
    return assembled(made, config, feature_extractor=extractor, **others)


def assembled(made: Any, config: ProcessorConfig, **parts: Any) -> Any:
    """A processor of the class ``made``, with its tokenizer, its own settings and these parts, which may be None."""
    import transformers

    takes = inspect.signature(made.__init__).parameters
    settings = {name: value for name, value in config.other.items() if name in takes}

    class Assembled(made):  # type: ignore[misc]
        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    return Assembled(**settings | parts | {"tokenizer": transformers.AutoTokenizer.from_pretrained(config.folder)})


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
