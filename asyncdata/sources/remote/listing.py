"""Which objects addresses name: single ones, globs, folders, and manifests. A bucket is listed once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, NamedTuple

import msgspec

from asyncdata.core.errors import SourceError
from asyncdata.core.identity import HTTP, Address, ObjectRefs, joined
from asyncdata.core.messages import StoreSpec
from asyncdata.core.settings import prepared
from asyncdata.sources.paths import GivenAddress, is_address, refuse_repeats, texts_of
from asyncdata.sources.remote.reads import Reads
from asyncdata.sources.remote.store import ObjectStamp, collected, quoted, store_spec
from asyncdata.sources.splits import Splits

_MANIFEST = ".manifest.jsonl"
_MAGIC = re.compile(r"[*?[]")
_MAX_HEADS = 64
"""Objects that are looked at one by one; of more, some, or their folder."""
_MAX_LISTED = 100
"""Objects that are listed for each one that is named: a page of 1,000 costs as much as some ten requests."""


class Objects(NamedTuple):
    """Objects, in order, and the stores that they are in."""

    refs: ObjectRefs
    stores: list[StoreSpec]


class _Entry(msgspec.Struct, frozen=True):
    """A line of a manifest; ``path`` may be relative to the manifest. Other keys are ignored."""

    path: str
    size: int
    etag: str


def find_objects(
    paths: str | Sequence[str],
    suffixes: Sequence[tuple[str, ...]],
    storage_options: Mapping[str, Any],
    *,
    allow_repeats: bool = False,
    splits: Splits | None = None,
) -> Objects:
    """The objects that addresses name, as they are now; the objects of a glob or folder are sorted by key.

    An address that ends with ``.manifest.jsonl`` names the objects in it: a line has the ``path``, ``size`` and
    ``etag`` of one, in their order, and no bucket is listed.

    :param suffixes: as for :func:`~asyncdata.sources.paths.find_files`; so is ``splits``.
    :raises ConfigError: for an address that names no store, or an object that is listed twice.
    :raises SourceError: naming what cannot be found or looked at.
    """
    given = [GivenAddress.parse(path) for path in texts_of(paths)]
    specs = {one.url: store_spec(one, storage_options) for one in given}
    numbers, stores = {url: number for number, url in enumerate(specs)}, list(specs.values())
    with closing(Reads(stores)) as reads:
        listed = _named_ones(reads, [(numbers[one.url], one.address) for one in given], suffixes)
        opened = [
            listed.get(one.address)
            or reads.start(_expanded, reads, numbers[one.url], one.address, suffixes, splits or Splits())
            for one in given
        ]
        faults: list[str] = []
        found: list[ObjectRefs] = []
        for future in opened:
            try:
                found.append(future.result() if isinstance(future, Future) else future)
            except SourceError as error:
                faults.append(str(error))
    if faults:
        raise SourceError("\n".join(faults))

    refs = joined(found)
    if not allow_repeats and not refs.is_ascending:
        refuse_repeats(refs.paths)
    return Objects(refs, stores)


class _TooManyError(Exception):
    """A folder has far more objects than are named."""


def _named_ones(
    reads: Reads, given: Sequence[tuple[int, Address]], suffixes: Sequence[tuple[str, ...]]
) -> dict[Address, ObjectRefs]:
    """Objects that are named one by one, where one listing of their folder tells of many."""
    if len(given) <= _MAX_HEADS:
        return {}

    wanted = sum(suffixes, ())
    folders: dict[tuple[int, str], list[Address]] = {}
    for number, address in given:
        key = address.key
        if address.scheme not in HTTP and key.endswith(wanted) and not _MAGIC.search(key) and _MANIFEST not in key:
            folders.setdefault((number, key.rpartition("/")[0]), []).append(address)
    many = [(number, named) for (number, _), named in folders.items() if len(named) > _MAX_HEADS]
    futures = [reads.start(_listed, reads, number, named) for number, named in many]
    return {address: found for future in futures for address, found in future.result().items()}


def _listed(reads: Reads, number: int, named: Sequence[Address]) -> dict[Address, ObjectRefs]:
    """The objects that a listing of their folder has.

    Empty where each is to be looked at: in a bucket of versions, which a listing does not tell; where nothing may be
    listed; or if the folder has far more.
    """
    num_seen = 0

    def is_wanted(key: str) -> bool:
        nonlocal num_seen
        num_seen += 1
        if num_seen > _MAX_LISTED * len(pinned):
            raise _TooManyError

        return key in pinned

    try:
        pinned = {reads.pinned(number, address).key: address for address in named}
        first = next(iter(pinned))
        folder = first.rpartition("/")[0]
        found = reads.list(number, f"{folder}/" if folder else "", is_wanted)
        keys = list(found.keys)
        here = ObjectStamp.of(found[keys.index(first)]) if first in keys else None
        if here is None or here.version != reads.head(number, here.address).version:
            return {}

    except (SourceError, _TooManyError):  # what is wrong is told of each
        return {}

    return {pinned[key]: found.taken([place]) for place, key in enumerate(keys)}


def _expanded(
    reads: Reads, number: int, address: Address, suffixes: Sequence[tuple[str, ...]], splits: Splits
) -> ObjectRefs:
    address = reads.pinned(number, address)
    key = address.key
    if key.endswith(_MANIFEST):
        return _in_manifest(reads, reads.head(number, address))

    if address.scheme in HTTP:
        if not key or key.endswith("/"):
            raise SourceError(f"AD327 {address} is a folder, and http has no list of files: name each, or a manifest")

        return _single(reads, number, address)

    magic = _MAGIC.search(key)
    if magic is not None:
        start, matches = key.rfind("/", 0, magic.start()) + 1, _pattern(key).fullmatch
        with_hidden = "/." in f"/{key[start:]}"

        def is_named(one: str) -> bool:
            return matches(one) is not None and (with_hidden or "/." not in f"/{one[start:]}")

        found = reads.list(number, key[: magic.start()], is_named)
        if not found:
            raise SourceError(f"AD308 {address} matches nothing in its bucket")

        return found

    if key and not key.endswith("/") and key.endswith(sum(suffixes, ())):
        return _single(reads, number, address)

    return _in_folder(reads, number, address, suffixes, splits)


def _in_folder(
    reads: Reads, number: int, address: Address, suffixes: Sequence[tuple[str, ...]], splits: Splits
) -> ObjectRefs:
    key = address.key
    folder = f"{key.rstrip('/')}/" if key else ""
    wanted = sum(suffixes, ())
    seen = False
    below = {suffix: set[str]() for suffix in suffixes}

    def is_wanted(one: str) -> bool:
        nonlocal seen
        seen = True
        name, slash, _ = one[len(folder) :].partition("/")
        if slash:
            for suffix in filter(one.endswith, suffixes):
                below[suffix].add(name)
        return one.endswith(wanted) and not slash and not name.startswith(".")

    here = reads.list(number, folder, is_wanted)
    paths = list(here.paths) if len(here) else []
    for suffix in suffixes:
        found = [place for place, path in enumerate(paths) if path.endswith(suffix)]
        kept = splits.kept(str(address), [paths[place] for place in found], suffix[0], below[suffix])
        if found:
            return here if len(kept) == len(here) else here.taken([found[number] for number in kept])

    if seen or not key or key.endswith("/"):
        raise SourceError(f"AD306 the folder {address} holds no *{suffixes[0][0]}; name the objects, or a glob")

    return _single(reads, number, address)


def _single(reads: Reads, number: int, address: Address) -> ObjectRefs:
    return collected([reads.head(number, address)], number).packed()


def _pattern(key: str) -> re.Pattern[str]:
    """A glob as a regular expression: ``*`` and ``?`` stay in their folder, ``**`` does not."""
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]/]+\])", key)
    rules = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    found = [
        rules.get(part) or (_characters(part) if number % 2 else re.escape(part)) for number, part in enumerate(parts)
    ]
    return re.compile("".join(found), re.DOTALL)


def _characters(part: str) -> str:
    inner = part[1:-1].replace("\\", r"\\")
    return f"[^/{inner[1:]}]" if inner.startswith("!") and len(inner) > 1 else f"[{inner}]"


def _in_manifest(reads: Reads, manifest: ObjectStamp) -> ObjectRefs:
    data = reads.fetch(manifest, 0, manifest.num_bytes) if manifest.num_bytes else b""
    found = collected(_lines(data, manifest), manifest.store).packed()
    if not found:
        raise SourceError(f"AD328 {manifest.path} names no object")

    return found


def _lines(data: bytes, manifest: ObjectStamp) -> Iterator[ObjectStamp]:
    folder = manifest.address.key.rpartition("/")[0]
    for line, text in enumerate(data.splitlines(), 1):
        if not text.strip():
            continue
        try:
            entry = msgspec.json.decode(text, type=prepared(_Entry))
        except msgspec.DecodeError as error:
            raise SourceError(
                f"AD328 {manifest.path}:{line}: {error}; a line of a manifest is "
                '{"path": "part-0.jsonl", "size": 123, "etag": "..."}'
            ) from error

        yield ObjectStamp(_address(entry, manifest, folder, line), entry.size, quoted(entry.etag))


def _address(entry: _Entry, manifest: ObjectStamp, folder: str, line: int) -> Address:
    if not is_address(entry.path):
        return manifest.address.with_key(f"{folder}/{entry.path}" if folder else entry.path)

    found = GivenAddress.parse(entry.path).address
    if found.root != manifest.address.root:
        raise SourceError(
            f"AD328 {manifest.path}:{line}: {found} is in another bucket; a manifest names objects of its own bucket"
        )

    return found


def with_heads(objects: Objects, num_bytes: int) -> Iterator[tuple[str, bytes]]:
    """Each object's address, and its first bytes.

    Of more than 64 objects, some are read; another is taken to begin as the first of those with its suffix, as each
    read is a request that costs money.
    """
    refs = objects.refs
    sizes = refs.sizes
    full = [number for number, size in enumerate(sizes) if size]
    names: dict[str, str] = {}  # so that equal suffixes take the memory of one
    suffixes = [names.setdefault(suffix, suffix) for suffix in map(_suffix, refs.keys)]
    firsts = {suffixes[number]: number for number in reversed(full)}
    step = -(-len(full) // _MAX_HEADS) or 1
    chosen = list(dict.fromkeys([*firsts.values(), *full[::step]]))
    stamps = [ObjectStamp.of(refs[number]) for number in chosen]
    with closing(Reads(objects.stores)) as reads:
        ranges = [(stamp, 0, min(num_bytes, stamp.num_bytes)) for stamp in stamps]
        heads = dict(zip(chosen, reads.read(ranges), strict=True))
    for number, path in enumerate(refs.paths):
        head = heads.get(number)
        if head is None:
            head = heads[firsts[suffixes[number]]] if sizes[number] else b""
        yield path, head


def _suffix(path: str) -> str:
    """As ``os.path.splitext`` has it, which takes three times as long."""
    name = path[path.rfind("/") + 1 :].lstrip(".")
    return name[place:] if (place := name.rfind(".")) >= 0 else ""
