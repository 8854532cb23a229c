"""Sounds of a row: how many samples they have by their headers, and the samples, by soundfile and soxr."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import from_clone
from asyncdata.tokenization.pictures.files import Medium, opened
from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from asyncdata.tokenization.pictures.settings import Processor

Array = np.ndarray[Any, np.dtype[Any]]

_CUT = re.compile(r"(?im)^ *(?:data|SSND)\s*: (\d+) \(should be (\d+)\)")
"""What libsndfile writes of a WAV or AIFF file that has less than its header says."""

_UNKNOWN = (1 << 31) - (1 << 16)
"""Bytes of samples that a WAV header says from there on, where a program that streamed it did not know them."""

_TAIL_S = 1
"""Seconds that are read after the part that is used of a longer sound: the last used samples depend on those after."""


class Wanted(NamedTuple):
    """What an extractor of features takes.

    :ivar rate: samples a second.
    :ivar most: samples; of a longer sound it uses the first ones.
    """

    rate: int
    most: int


class _Header(NamedTuple):
    frames: int
    rate: int
    channels: int

    def at(self, wanted: Wanted) -> int:
        """Samples at the wanted rate: transformers rounds up."""
        return -(-self.frames * wanted.rate // self.rate)


def load_packages() -> tuple[Any, Any]:
    """The packages soundfile and soxr.

    :raises ConfigError: if they are not there.
    """
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # soundfile loads a library
        raise ConfigError(f"sounds need soundfile and soxr ({error}): {from_clone('audio')}") from error

    return soundfile, soxr


def _as_file(sound: Medium) -> Medium:
    """The sound with the bytes of a file, if its row has it as numbers.

    :raises RowFault: AD457, if they are not of one channel, or there is no rate.
    """
    if sound.path or sound.url or sound.data is not None:
        return sound

    try:
        rate = sound.value.get("sampling_rate")
        samples = np.asarray(sound.value["array"], np.float32)
        if samples.ndim != 1 or not isinstance(rate, int):
            raise ValueError(f"shape {samples.shape}, sampling_rate {rate!r:.20}")

        load_packages()[0].write(written := io.BytesIO(), samples, rate, "FLOAT", format="WAV")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = f"'array' must be the samples of one channel, and 'sampling_rate' an integer: {error!s:.200}"
        raise RowFault("AD457", f"{sound.name}: {reason}") from None

    return sound._replace(data=written.getvalue())


def length_of(sound: Medium, wanted: Wanted, settings: Processor) -> tuple[int, int]:
    """The samples of a sound at the wanted rate, by its header, which may be more than are used; and the bytes that
    their decoding takes: samples of all channels, of their mean, and at the wanted rate.

    :raises RowFault: AD457, if its header does not tell, or it is beyond a limit.
    """
    with opened(_as_file(sound), settings) as (what, file), _sound_file(what, file) as source:
        header = _header(what, source, wanted, settings)
        length = header.at(wanted)
        num_samples = _num_used(header, wanted) * (header.channels + 1) + min(length, wanted.most)
        return length, num_samples * np.float32().nbytes


def samples_of(sound: Medium, wanted: Wanted, settings: Processor) -> Array:
    """The samples that are used: float32, the mean of all channels, at the wanted rate.

    :raises RowFault: AD457, as above, or if there are fewer than by the header.
    """
    soxr = load_packages()[1]
    with opened(_as_file(sound), settings) as (what, file), _sound_file(what, file) as source:
        header = _header(what, source, wanted, settings)
        num_used = _num_used(header, wanted)
        # `frames=` and no `soundfile.read`, nor parts: an MP3 that is read from a position is rounded differently
        found = source.read(num_used, dtype="float32", always_2d=True)
        if len(found) < num_used:
            raise RowFault("AD457", f"{what} is cut: it has {len(found):,} samples of {num_used:,}")

        mixed = found.mean(axis=1)
        if header.rate != wanted.rate:
            mixed = soxr.resample(mixed, header.rate, wanted.rate, quality="HQ")
        number = min(header.at(wanted), wanted.most)
        return np.pad(mixed[:number], (0, max(0, number - len(mixed))))


def _sound_file(what: str, file: Any) -> Any:
    soundfile = load_packages()[0]
    try:
        if isinstance(file, io.BytesIO):
            return soundfile.SoundFile(file)

        return soundfile.SoundFile(file.fileno(), closefd=False)
    except soundfile.LibsndfileError as error:
        way_out = "WAV, FLAC, Ogg (Vorbis, Opus), MP3 and AIFF are read; convert others, such as M4A"
        raise RowFault("AD457", f"{what} cannot be read: {error.error_string} {way_out}") from None


def _header(what: str, source: Any, wanted: Wanted, settings: Processor) -> _Header:
    header = _Header(source.frames, source.samplerate, source.channels)
    if not 0 < header.frames < 1 << 62:
        says = "no samples" if header.frames == 0 else "no length, as of a stream: write it again as a file"
        raise RowFault("AD457", f"{what} has {says}")

    for says, has in _CUT.findall(source.extra_info):
        if int(has) < int(says) < _UNKNOWN:
            raise RowFault("AD457", f"{what} is cut: it has {int(has):,} bytes of samples of {int(says):,}")

    seconds, most_s = header.frames / header.rate, wanted.most / wanted.rate
    if header.at(wanted) > wanted.most and settings.long_sounds == "refuse":
        way_out = 'cut it into pieces; Processor(long_sounds="cut") uses the beginning'
        raise RowFault("AD457", f"{what} has {seconds:,.1f} s, and the processor uses {most_s:g} s of it: {way_out}")

    num_samples = _num_used(header, wanted) * header.channels
    if num_samples > settings.max_samples:
        raise RowFault("AD457", f"{what} has {num_samples:,} samples; max_samples={settings.max_samples:,}")

    return header


def _num_used(header: _Header, wanted: Wanted) -> int:
    """The samples that are read of each channel."""
    if header.at(wanted) <= wanted.most:
        return header.frames

    return min(header.frames, -(-wanted.most * header.rate // wanted.rate) + _TAIL_S * header.rate)
