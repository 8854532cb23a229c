"""Sounds, by a processor of transformers: texts and shapes from lengths, and features from samples."""

from __future__ import annotations

import copy
import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.core.columns import FRAMES
from asyncdata.tokenization.pictures.kinds import Array, Kind, Planned, refused
from asyncdata.tokenization.pictures.settings import FEATURES, NUM_FRAMES, Processor, ProcessorConfig
from asyncdata.tokenization.pictures.sounds import Wanted, length_of, load_packages, samples_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdata.tokenization.pictures.files import Medium

_KEPT = 4096

SOUND_CUT = "sound_cut"
"""The note of a sound of which the processor uses only the beginning."""


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
