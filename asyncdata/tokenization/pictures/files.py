"""Media of a row: what names them, and their files; also on web servers that a user has allowed. Only the standard
library reads those: it works in any process. Of pictures also the sizes by their headers, and the pixels.
"""

from __future__ import annotations

import base64
import binascii
import http.client
import io
import os
import posixpath
import re
import stat
import tarfile
import threading
import time
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import IO, TYPE_CHECKING, Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit

from asyncdata.core.errors import ConfigError
from asyncdata.tokenization.rows import RowFault, json_type

if TYPE_CHECKING:
    from asyncdata.tokenization.pictures.settings import Processor


_ARCHIVE = re.compile(r"(?i)(.+?\.(?:zip|tar))/(.+)", re.DOTALL)
_KEPT = 8

Member = tuple[int, "Callable[[], bytes]"]
"""The number of a member's bytes, and what reads them."""


def member_of(path: str) -> Member | None:
    """The member of a zip or tar file at a path such as ``a.zip/b.png``; None if the path leads through no such file.

    :raises OSError: if there is no such member; otherwise what the readers of archives raise.
    """
    start = 0
    while found := _ARCHIVE.match(path, start):
        start, archive = found.end(1), path[: found.end(1)]
        if os.path.isfile(archive):
            about = os.stat(archive)
            members = _members(archive, (about.st_mtime_ns, about.st_size), os.getpid())
            member = members.get(posixpath.normpath(found[2]))
            if member is None:
                raise FileNotFoundError(f"{archive} has no member {found[2]!r:.200}")

            return member
    return None


@lru_cache(_KEPT)
def _members(archive: str, state: tuple[int, int], process: int) -> dict[str, Member]:
    """The members by their names.

    :param state: of the file: one that has changed is read again; so it is in a forked ``process``.
    """
    if not archive.lower().endswith(".tar"):
        zipped = zipfile.ZipFile(archive)
        return {
            posixpath.normpath(each.filename): (each.file_size, partial(zipped.read, each)) for each in zipped.filelist
        }

    found: dict[str, Member] = {}
    with tarfile.open(archive, "r:") as tar:
        while each := tar.next():
            if each.isreg() and not each.issparse():
                read = partial(_read_member, archive, each.offset_data, each.size)
                found[posixpath.normpath(each.name)] = each.size, read
            tar.members = []  # type: ignore[attr-defined]  # they would take more memory than what is kept
    return found


def _read_member(path: str, start: int, num_bytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        return file.read(num_bytes)


_ORIENTATION, _SWAPS_SIDES = 274, 5
_CHAINED = re.compile(r"(?:zip|tar)://([^:]+)::(?:file://)?([^:]+)")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
_BYTES = ("bytes", "base64", "data")
_SIZES = ("min_pixels", "max_pixels", "resized_height", "resized_width")
_SAMPLING = ("fps", "nframes", "num_frames", "min_frames", "max_frames", "video_start", "video_end", "total_pixels")
_SETTINGS = {"image": _SIZES, "video": (*_SIZES, *_SAMPLING)}
_OF_KINDS = {"audio": ("input_audio", "array")}
_RATES = ("sample_fps", "processed_fps")
_TIMES = "frames_timestamp"
"""How qwen-vl-utils and XTuner name the rate of frames that were chosen before, and XTuner the second of each."""
_BASE64 = re.compile(
    r"(?=.{64})(?=iVBORw0KGgo|/9j/|R0lGOD|UklGR|SUkqA|TU0AK|.{1024})[A-Za-z0-9+/\s]+={0,2}\s*", re.DOTALL
)
"""Text that is no path: it begins as PNG, JPEG, GIF, WebP or TIFF do in base64, or is longer than any path without a
dot."""
_MAX_SHOWN = 200
NOUNS = {"image": "picture", "video": "video", "audio": "sound"}
"""What the kinds of media are called in errors."""


class Medium(NamedTuple):
    """A medium: its kind, its name for errors, its path, address or bytes, and what the row says of it.

    :ivar frames: of a video that is a list of pictures; ``fps``: how many of them are a second, 0: nothing says it;
        ``times``: what the row says of the second of each.
    """

    kind: str
    name: str
    path: str = ""
    url: str = ""
    data: bytes | None = None
    value: Any = None
    frames: tuple[Medium, ...] = ()
    fps: float = 0
    times: Any = None


def named_medium(kind: str, value: Any, name: str, settings: Processor) -> Medium:
    """What a row says of a medium: a path, an address (``data:``, ``file:``, ``http:`` or ``https:``), or an object
    with one of them, or base64 text, as sources give bytes.

    An object ``{"bytes": ..., "path": ...}`` is how Hugging Face stores media, and ``{"source": {"data": ...}}`` how
    Anthropic's messages have them.

    :raises RowFault: AD457, for anything else.
    """
    if isinstance(value, dict):
        return _of_object(kind, value, name, settings)

    if kind == "video" and isinstance(value, list) and value:
        frames = (named_medium("image", each, f"frame {at} of {name}", settings) for at, each in enumerate(value, 1))
        return Medium(kind, name, value=value, frames=tuple(frames))

    if not isinstance(value, str):
        raise RowFault("AD457", f"{name} must be a path, an address or an object, got {json_type(value)}")

    if value.startswith("data:") or _BASE64.fullmatch(value):
        return Medium(kind, name, data=_decoded(value.partition(",")[2] or value, name), value=value)

    scheme, chained = _SCHEME.match(value), _CHAINED.fullmatch(value)
    if scheme is None or chained is not None:
        path = value if chained is None else f"{chained[2]}/{chained[1]}"
        return Medium(kind, name, path=_path(path, name, settings.media_root), value=value)

    if scheme[1].lower() in ("http", "https"):
        return Medium(kind, name, url=allowed(value, name, settings), value=value)

    path = value[scheme.end() :]
    if scheme[1].lower() != "file" or not path.startswith("/"):
        raise RowFault(
            "AD457",
            f"{name} is at {without_query(value)[:200]!r}; {NOUNS[kind]}s are read from paths, from file:///path "
            "without a host, and by http(s) from Processor(allowed_hosts=...): download it, mount its store, or give "
            "an address of https",
        )

    return Medium(kind, name, path=_path(path, name, settings.media_root), value=value)


def _of_object(kind: str, value: dict[str, Any], name: str, settings: Processor) -> Medium:
    keys = (kind, f"{kind}_url", *_OF_KINDS.get(kind, ()), "url", "path", "source", *_BYTES)
    given = [(key, value[key]) for key in keys if value.get(key)]
    if not given:
        raise RowFault(
            "AD457", f"{name} is an object of {', '.join(map(ascii, value)) or 'nothing'}; need one of {keys}"
        )

    if sized := [key for key in _SETTINGS.get(kind, ()) if value.get(key)]:
        way_out = f"the processor's files say it for all {NOUNS[kind]}s"
        raise RowFault("AD457", f"{name} has {sized[0]!r}, which is not read: leave it out; {way_out}")

    key, inner = min(given, key=lambda item: item[0] not in _BYTES)
    if key == "array":
        return Medium(kind, name, value=value)

    if key in _BYTES:
        return Medium(kind, name, data=_decoded(inner, name), value=value)

    found = named_medium(kind, inner, name, settings)
    rates = [value[key] for key in _RATES if isinstance(value.get(key), int | float)]
    if kind != "video":
        return found

    return found._replace(fps=rates[0] if rates else found.fps, times=value.get(_TIMES) or found.times)


def held(medium: Medium, settings: Processor) -> Medium:
    """The medium with its bytes, if it is remote: what is read of it twice is then the same.

    :raises RowFault: AD457, if it cannot be fetched.
    """
    return medium._replace(data=fetched(medium.url, medium.name, settings)) if medium.url else medium


def _decoded(text: Any, name: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)  # it may be wrapped into lines
    except (AttributeError, ValueError, binascii.Error) as error:
        raise RowFault("AD457", f"{name} is not base64 text: {error}") from None


def _path(path: str, name: str, root: str | None) -> str:
    if root is None:
        return path

    found = os.path.realpath(os.path.join(root, path))
    if os.path.commonpath([found, os.path.realpath(root)]) != os.path.realpath(root):
        raise RowFault("AD457", f"{name} is at {path!r}, which is outside of media_root={root!r}")

    return found


def size_of(picture: Medium, settings: Processor) -> tuple[int, int]:
    """Height and width of the picture as it is turned, by its header.

    :raises RowFault: AD457, if it cannot be read, or is beyond a limit.
    """
    with _opened(picture, settings) as image:
        width, height = image.size
        turn = 1 if image.format == "TIFF" else image.getexif().get(_ORIENTATION, 1)  # Pillow turns TIFFs itself
    return (width, height) if turn >= _SWAPS_SIDES else (height, width)


def turned(picture: Medium, settings: Processor) -> Any:
    """The picture in RGB, turned as it says.

    :raises RowFault: AD457, as above, or if its pixels cannot be decoded.
    """
    from PIL import ImageOps

    with _opened(picture, settings) as image:
        return ImageOps.exif_transpose(image).convert("RGB")


@contextmanager
def _opened(picture: Medium, settings: Processor) -> Iterator[Any]:
    """The picture as Pillow opens it; any error within the block is the row's."""
    from PIL import Image, UnidentifiedImageError

    with opened(picture, settings) as (what, file):
        try:
            image = Image.open(file)
        except UnidentifiedImageError:
            raise RowFault("AD457", f"{what} cannot be read: it is no picture that Pillow knows") from None

        with image:
            check_size(what, *image.size, settings)
            yield image


def check_size(what: str, width: int, height: int, settings: Processor) -> None:
    """Check the pixels of a picture, or of the frames of a video.

    :raises RowFault: AD457, if they are beyond a limit.
    """
    if not 0 < width * height <= settings.max_pixels:
        raise RowFault("AD457", f"{what} has {width} x {height} pixels; max_pixels={settings.max_pixels:,}")

    if max(width, height) > settings.max_aspect * min(width, height):
        raise RowFault("AD457", f"{what} is {width} x {height}, more than {settings.max_aspect} to 1")


@contextmanager
def opened(medium: Medium, settings: Processor) -> Iterator[tuple[str, IO[bytes]]]:
    """What a medium is called in errors, with its place, and its file; any error within the block is the row's."""
    where = without_query(medium.url) if medium.url else medium.path
    what = f"{medium.name} ({where[:_MAX_SHOWN] or 'bytes of the row'})"
    if medium.data is None:
        medium = held(medium, settings)
    try:
        member = member_of(medium.path) if medium.data is None else None
        if member is not None:
            num_bytes = member[0]
        elif medium.data is not None:
            num_bytes = len(medium.data)
        else:
            about = os.stat(medium.path)
            num_bytes = about.st_size if medium.kind == "image" else 0  # others are read in pieces
            if not stat.S_ISREG(about.st_mode):
                raise RowFault("AD457", f"{what} cannot be read: it is no file")

        if num_bytes > settings.max_bytes:
            raise RowFault("AD457", f"{what} has {num_bytes:,} bytes, more than max_bytes={settings.max_bytes:,}")

        data = medium.data if member is None else member[1]()
        # Pillow maps some files of a path into memory, and then turns a TIFF wrongly; one that shrinks would be fatal.
        with open(medium.path, "rb") if data is None else io.BytesIO(data) as file:
            yield what, file
    except (RowFault, MemoryError, ConfigError):
        raise
    except Exception as error:  # readers raise what their formats suggest
        raise RowFault("AD457", f"{what} cannot be read: {error!r:.200}") from error


_PORTS = {"http": ":80", "https": ":443"}
_TRIES, _PAUSE_S, _CHUNK = 3, 0.25, 1 << 18
_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_AS_THEY_ARE = "!#$%&'()*+,/:;=?@[]~"
_FAILURES = (OSError, http.client.HTTPException)


def without_query(url: str) -> str:
    """The address for errors, without user, password and query: a query may be a signature that gives access."""
    scheme, _, rest = url.partition("?")[0].partition("#")[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def allowed(url: str, name: str, settings: Processor) -> str:
    """The address as it is asked for, with what is not ASCII quoted.

    :raises RowFault: AD457, if it has a user, or its host is not one of ``allowed_hosts``.
    """
    url = quote(url, safe=_AS_THEY_ARE)
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise RowFault("AD457", f"{name} has an address that cannot be read: {error}") from None

    what, port = f"{name} is remote ({without_query(url):.200})", _PORTS.get(parts.scheme)
    if port is None:
        raise RowFault("AD457", f"{what}: neither http nor https")

    if "@" in parts.netloc:
        raise RowFault("AD457", f"{what}, and its address has a user or a password, which are not sent: leave them out")

    host = parts.netloc.lower().removesuffix(port)
    if not {host, host + port} & {*settings.allowed_hosts}:
        raise RowFault(
            "AD457",
            f"{what}, and {host!r} is not in allowed_hosts={settings.allowed_hosts}: name it in "
            "Processor(allowed_hosts=...), or download it before, and name paths",
        )

    return url


def fetched(url: str, name: str, settings: Processor) -> bytes:
    """The bytes of a medium at an address that is :func:`allowed`.

    Failures of the network and of an overloaded server are tried again, three tries in all.

    :raises RowFault: AD457, if it cannot be had within ``timeout_s``, has too many bytes, or leads to another host.
    """
    what, end, number = f"{name} ({without_query(url):.200})", time.monotonic() + settings.timeout_s, 1
    opener = urllib.request.build_opener(_Follower(name, settings))
    while True:
        try:
            return _read(opener, url, what, end, settings)
        except _FAILURES as error:
            left = end - time.monotonic() - _PAUSE_S * number
            is_final = isinstance(error, HTTPError) and error.code not in _AGAIN
            if is_final or number == _TRIES or left <= 0:
                raise RowFault("AD457", f"{what} cannot be fetched: {_reason(error, settings)}; try {number}") from None

        threading.Event().wait(_PAUSE_S * number)
        number += 1


def _read(opener: urllib.request.OpenerDirector, url: str, what: str, end: float, settings: Processor) -> bytes:
    data = bytearray()
    with opener.open(url, timeout=max(end - time.monotonic(), _PAUSE_S)) as answer:
        announced = int(answer.headers.get("content-length") or 0)
        while len(data) <= settings.max_bytes and announced <= settings.max_bytes:
            chunk = answer.read1(_CHUNK)
            if not chunk:
                break

            data += chunk
            if time.monotonic() > end:
                raise TimeoutError
    num_bytes = max(announced, len(data))
    if num_bytes > settings.max_bytes:
        raise RowFault("AD457", f"{what} has {num_bytes:,} bytes or more; max_bytes={settings.max_bytes:,}")

    if len(data) < announced:  # a connection that was cut looks like an end to `read1`
        raise ConnectionError(f"{len(data):,} of {announced:,} bytes came")

    return bytes(data)


def _reason(error: Exception, settings: Processor) -> str:
    """What has happened, without the address."""
    cause = error.reason if isinstance(error, URLError) and not isinstance(error, HTTPError) else error
    if isinstance(cause, TimeoutError):
        return f"no whole answer within timeout_s={settings.timeout_s:g}"

    return f"status {cause.code}" if isinstance(cause, HTTPError) else f"{type(cause).__name__}: {cause!s:.200}"


class _Follower(urllib.request.HTTPRedirectHandler):
    """Follows redirections to allowed hosts only."""

    def __init__(self, name: str, settings: Processor) -> None:
        self._name, self._settings = name, settings

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        try:
            url = allowed(newurl, f"{self._name} is redirected, and", self._settings)
        except RowFault:
            fp.close()
            raise

        return super().redirect_request(req, fp, code, msg, headers, url)
