"""Videos: the number, the rate and the size of their frames by the header, and the frames that are asked for.

PyAV reads them, and nothing but a container of videos: a playlist, which could name other files, is refused.
"""

from __future__ import annotations

import io
import os
import re
from bisect import bisect_right
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncdata.core.errors import ConfigError
from asyncdata.core.settings import from_clone
from asyncdata.tokenization.pictures.files import Medium, check_size, named_medium, opened, size_of, turned
from asyncdata.tokenization.rows import RowFault

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncdata.tokenization.pictures.settings import Processor

Array = np.ndarray[Any, np.dtype[Any]]

_CONTAINERS = "mov,matroska,avi,mpegts,mpeg,h264,hevc,flv,asf,ogg,gif,ivf,mpegvideo,m4v"
_OPTIONS = {"format_whitelist": _CONTAINERS, "protocol_whitelist": "file"}
_KEPT = 4096
_MOST = 1 << 22
"""Frames of a file that are believed: two days of them."""

_FPS = 2.0
"""Of frames that are given as pictures, where the row says nothing; so LLaMA-Factory has it."""

_PICTURE = re.compile(r"(?i).*\.(?:bmp|gif|jpe?g|png|tiff?|webp)")


class Header(NamedTuple):
    """What is known of a video before it is decoded.

    :ivar fps: frames a second; ``height`` and ``width``: of a frame as it is turned.
    :ivar turn: quarters of a turn against the clock by which frames are turned.
    :ivar frames: pictures that are the frames; () where they are in the file.
    :ivar times: the seconds of these, if they are known.
    """

    num_frames: int
    fps: float
    height: int
    width: int
    turn: int = 0
    frames: tuple[Medium, ...] = ()
    times: tuple[float, ...] = ()


def header_of(video: Medium, settings: Processor) -> Header:
    """The header of a video.

    :raises RowFault: AD457, if it cannot be read, or is beyond a limit.
    :raises ConfigError: if PyAV is not installed.
    """
    frames = video.frames or (_in_folder(video, settings) if os.path.isdir(video.path) else ())
    if frames:
        sizes = {size_of(frame, settings) for frame in frames}
        if len(sizes) > 1:
            raise RowFault("AD457", f"{video.name} has frames of several sizes: {sorted(sizes)[:4]}")

        return Header(len(frames), video.fps or _FPS, *sizes.pop(), frames=frames, times=_times(video, len(frames)))

    _times(video, 0)

    with opened(video, settings) as (what, file):
        if isinstance(file, io.BytesIO):
            found = _read(file)
        else:
            about = os.stat(file.fileno())
            found = _read_once(video.path, about.st_mtime_ns, about.st_size)
        if not 0 < found.num_frames < _MOST or not 0 < found.fps < _MOST:
            raise RowFault("AD457", f"{what} has {found.num_frames} frames, {found.fps:g} a second: it is no video")

        check_size(what, found.width, found.height, settings)
        return found


def _times(video: Medium, number: int) -> tuple[float, ...]:
    times = video.times or []
    if times and not (isinstance(times, list) and [type(time) in (int, float) for time in times] == [True] * number):
        reason = f"need a number for each of {number}" if number else "which is read of frames that are pictures only"
        raise RowFault("AD457", f"{video.name} has 'frames_timestamp', {reason}; or leave it out")

    return tuple(times)


def _in_folder(video: Medium, settings: Processor) -> tuple[Medium, ...]:
    """The pictures of a folder; numbers in their names are counted by their values."""
    names = [name for name in os.listdir(video.path) if _PICTURE.fullmatch(name)]
    if not names:
        raise RowFault("AD457", f"{video.name} ({video.path}) is a folder without pictures")

    names.sort(key=lambda name: [int(piece) if piece.isdecimal() else piece for piece in re.split(r"([0-9]+)", name)])
    paths = [os.path.join(video.path, name) for name in names]
    return tuple(named_medium("image", path, f"a frame of {video.name}", settings) for path in paths)


@lru_cache(_KEPT)
def _read_once(path: str, changed_ns: int, num_bytes: int) -> Header:
    """As :func:`_read`, once for each state of a file."""
    return _read(path)


def _read(source: str | IO[bytes]) -> Header:
    with _container(source) as box:
        stream = _stream(box)
        rate = stream.average_rate or stream.guessed_rate
        number, length = stream.frames, stream.duration
        if number and rate and length and abs(number / rate - length * stream.time_base) > 1 / rate:
            number = 0  # it counts frames that an edit list hides, or that are missing
        number = number or sum(packet.size > 0 and not packet.is_discard for packet in box.demux(stream))
    with _container(source) as box:  # only a frame knows how it is turned
        first = next(box.decode(_stream(box)), None)
        if first is None:
            return Header(0, 0, 0, 0)

        turn = round(first.rotation / 90) % 4
        height, width = (first.width, first.height) if turn % 2 else (first.height, first.width)
    return Header(number, float(rate or 0), height, width, turn)


def _container(source: str | IO[bytes]) -> Any:
    try:
        import av
    except ImportError as error:
        raise ConfigError(f"AD457 videos need PyAV ({error}): pip install av, or {from_clone('video')}") from error

    if not isinstance(source, str):
        source.seek(0)
    return av.open(source, options=dict(_OPTIONS))


def _stream(box: Any) -> Any:
    """The video of a file, decoded by one thread: there are many workers."""
    stream = next(iter(box.streams.video), None)
    if stream is None or stream.codec_context is None:
        raise ValueError("it has no video, or none that can be decoded")

    stream.codec_context.thread_count = 1
    return stream


def frames_of(video: Medium, header: Header, indices: Sequence[int], settings: Processor) -> Array:
    """Frames of a video by their numbers, in the order in which they are shown.

    :returns: uint8 of shape (number of frames, height, width, 3), RGB.
    :raises RowFault: AD457, if one cannot be decoded, or has another size than by the header.
    """
    found = np.empty((len(indices), header.height, header.width, 3), np.uint8)
    left = dict[int, list[int]]()
    for place, index in enumerate(indices):
        left.setdefault(index, []).append(place)
    if header.frames:
        for index, places in left.items():
            found[places] = _fitting(np.asarray(turned(header.frames[index], settings)), header, video.name)
        return found

    with opened(video, settings) as (what, file):
        source = file if isinstance(file, io.BytesIO) else video.path
        for read in (_jumping, _in_order):
            for index, frame in read(source, sorted(left)) if left else ():
                if frame.is_corrupt:
                    raise RowFault("AD457", f"{what} has a frame {index} that is damaged")

                pixels = np.rot90(frame.to_ndarray(format="rgb24"), header.turn)
                found[left.pop(index)] = _fitting(pixels, header, what)
        if left:
            raise RowFault(
                "AD457",
                f"{what} has no frame {min(left)}, and has {header.num_frames} frames by its header, or by its packets",
            )

    return found


def _fitting(pixels: Array, header: Header, what: str) -> Array:
    if pixels.shape != (header.height, header.width, 3):
        size = f"{header.width} x {header.height}"
        raise RowFault(
            "AD457", f"{what} has a frame of {pixels.shape[1]} x {pixels.shape[0]}, and its first has {size}"
        )

    return pixels


def _jumping(source: Any, indices: list[int]) -> Iterator[tuple[int, Any]]:
    """Frames by their numbers, from the nearest key frames on.

    A frame is known by its time, so a jump that misses, as in a transport stream, yields nothing wrong: what it has
    passed over is not yielded.
    """
    with _container(source) as box:
        packets = [
            (packet.pts, packet.is_keyframe)
            for packet in box.demux(_stream(box))
            if packet.size > 0 and not packet.is_discard
        ]
    number = {pts: index for index, pts in enumerate(sorted(pts for pts, _ in packets if pts is not None))}
    times = list(number)
    keys = sorted(number[pts] for pts, is_key in packets if is_key and pts is not None)
    if len(number) < len(packets) or not keys or len(keys) == 1:  # times are missing or doubled, or there is no jump
        return

    with _container(source) as box:
        stream, at, flow = _stream(box), -1, None
        for index in indices:
            if index >= len(times):
                return

            key = keys[max(bisect_right(keys, index) - 1, 0)]
            if flow is None or key > at + 1:
                box.seek(times[key], stream=stream, backward=True)
                flow = box.decode(stream)
            for frame in flow:
                at = number.get(frame.pts, at)
                if at == index and not frame.is_corrupt:  # it may lack what it was predicted from
                    yield index, frame
                if at >= index:
                    break


def _in_order(source: Any, indices: list[int]) -> Iterator[tuple[int, Any]]:
    """Frames by their numbers, all read up to the last."""
    wanted = set(indices)
    with _container(source) as box:
        for index, frame in enumerate(box.decode(_stream(box))):
            if index in wanted:
                yield index, frame
            if index >= indices[-1]:
                return
