"""From a snapshot to the ledger that it was taken of, or to an epoch where its place means nothing any more."""

from __future__ import annotations

import json
from binascii import a2b_base64
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs

from asyncdata.core.errors import ConfigError, SnapshotError, SnapshotMismatchError, get_logger
from asyncdata.core.settings import prepared
from asyncdata.core.types import Position
from asyncdata.delivery.chunk import StreamDigest
from asyncdata.delivery.ledger import Counters, Ledger, Returned, Served
from asyncdata.delivery.rollout_buffer import record_of
from asyncdata.order.order import ROWS_PER_WINDOW

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from asyncdata.checkpoint.snapshot import Snapshot
    from asyncdata.core.identity import FileRefs
    from asyncdata.delivery.rollouts import Rollouts


_OUTCOMES = "outcomes"
"""May change without an effect on the place in the order; ``asyncdata.loader.outcomes`` checks it."""
_SETTINGS = ("data", "tokenizer", "template", "tokenize_fn", "seed", "order")
_MAX_WORDS = 10
_KINDS = ("data", "tokenizer", "template", "tokenize_fn")
_SHORT = 100
_EFFECTS = {
    "data": "the saved position would point at other rows",
    "tokenizer": "the samples to come would have other tokens than those delivered",
    "template": "the prompts to come would be rendered otherwise than those delivered",
    "tokenize_fn": "the rows to come would become other samples",
    "seed": "the rows would come in another order, some a second time and some not at all",
    "order": "the rows would come in another order, some a second time and some not at all",
}


def check(
    saved: Snapshot,
    order: Mapping[str, Any],
    fingerprints: Mapping[str, Any],
    allow_changed: Collection[str] = (),
    *,
    same_rows: bool = False,
) -> set[str]:
    """Refuse a snapshot of other data or settings, but for what is in ``allow_changed``; which settings those are.

    :param same_rows: the data's files may have other names, if their content and their order are the same. That is no
        change then.
    :raises SnapshotMismatchError: with every difference, in words and as a value.
    :raises ConfigError: if ``allow_changed`` names anything but data, tokenizer, template, tokenize_fn, seed, order and
        outcomes.
    """
    allowed = _allowed(allow_changed)
    found = find_changes(saved.order, saved.fingerprints, order, fingerprints)
    faults = content_changes(*found["data"]) if "data" in found else []
    is_renamed = "data" in found and not faults
    if same_rows and faults:
        raise SnapshotMismatchError(
            "AD603 same_rows=True, but the rows are not known to be the same:\n  " + "\n  ".join(faults) + "\n"
            'Give back the files; or pass allow_changed={"data"} alone, to leave out the rest of the epoch.',
            {"data": found["data"]},
        )

    if same_rows:
        found.pop("data", None)
    refused = {name: pair for name, pair in found.items() if setting_of(name) not in allowed}
    if not refused:
        return set(map(setting_of, found))

    lines = [f"  {describe_change(name, *pair)}" for name, pair in refused.items()]
    if is_renamed and "data" in refused:
        lines.append("  The files have the same content under other names: pass same_rows=True to stay at the place.")
    override = ", ".join(f'"{name}"' for name in _SETTINGS if name in allowed | set(map(setting_of, refused)))
    raise SnapshotMismatchError(
        "AD603 this snapshot was taken with other data or settings:\n" + "\n".join(lines) + "\n"
        f"Give back what it was taken with; or, to continue anyway, pass allow_changed={{{override}}}.",
        refused,
    )


def _allowed(names: Collection[str]) -> set[str]:
    known = {*_SETTINGS, _OUTCOMES}
    unknown = [names] if isinstance(names, str) else sorted(set(names) - known)
    if unknown:
        raise ConfigError(
            f"allow_changed must be a set of names out of {', '.join((*_SETTINGS, _OUTCOMES))}; got {unknown}"
        )

    return set(names)


def find_changes(
    saved_order: Mapping[str, Any],
    saved_fingerprints: Mapping[str, Any],
    order: Mapping[str, Any],
    fingerprints: Mapping[str, Any],
) -> dict[str, tuple[Any, Any]]:
    """``{what: (saved, present)}``; what is data, tokenizer, template, tokenize_fn, seed, or ``order.`` and a setting.

    A fingerprint that either side does not know (None, absent) differs from none. Counts of the data (``order.num_*``)
    follow from the rest, so that they are named only if nothing else explains them.
    """
    pairs = {}
    for name in _KINDS:
        saved, now = saved_fingerprints.get(name), fingerprints.get(name)
        if saved is not None and now is not None:
            pairs[name] = saved, now
    for name in sorted(saved_order.keys() | order.keys()):
        pairs["seed" if name == "seed" else f"order.{name}"] = saved_order.get(name), order.get(name)

    changes = {name: pair for name, pair in pairs.items() if _identity(pair[0]) != _identity(pair[1])}
    counts = {name for name in changes if name.startswith("order.num_")}
    explained = any(name == "data" or name.startswith("order.") for name in changes.keys() - counts)
    return {name: pair for name, pair in changes.items() if not (explained and name in counts)}


def setting_of(change: str) -> str:
    """What has to be allowed for this change: ``order.block_bytes`` comes under ``order``, a count under ``data``."""
    return "data" if change.startswith("order.num_") else change.partition(".")[0]


def describe_change(change: str, saved: Any, present: Any) -> str:
    """One line: what differs, both values, and the effect of the difference."""
    words = _data_changes(saved, present) if change == "data" else []
    what = "; ".join(words) or f"saved {_short(saved)}, present {_short(present)}"
    return f"{change}: {what}: {_EFFECTS[setting_of(change)]}"


def _identity(value: Any) -> str:
    """Fingerprints with a digest are known by it, so that what is listed beside it may change."""
    return _text(value["digest"] if isinstance(value, dict) and "digest" in value else value)


def _text(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True)  # not canonical(): text from a snapshot may hold lone surrogates
    except (TypeError, ValueError, RecursionError):
        return f"<a {type(value).__name__} that JSON cannot hold, at {id(value):#x}>"  # like nothing else: refused


def _short(value: Any) -> str:
    text = "(unset)" if value is None else _text(value)
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


class _Fingerprint(msgspec.Struct):
    num_files: int
    num_bytes: int
    digest: str
    files: list[tuple[str, int, str]] = []
    content: str | None = None
    commits: dict[str, str] = {}


def _data_changes(saved: Any, present: Any) -> list[str]:
    """A phrase for each file that differs, at most ten and a count of the rest."""
    pair = _fingerprints(saved, present)
    if pair is None:
        return []

    before, after = pair
    words = _file_changes(before, after) if before.files and after.files else []
    words = words or [f"{_size(before)} -> {_size(after)}, of other content"]
    return _commit_changes(before.commits, after.commits) + _few(words)


def _commit_changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    moved = [name for name in before if name in after and before[name] != after[name]]
    return [f"{name} is at another commit now; {name}@{before[name]} is what it was" for name in moved]


def _fingerprints(saved: Any, present: Any) -> tuple[_Fingerprint, _Fingerprint] | None:
    """None if it is not a fingerprint of files: a source may have its own kind of fingerprint."""
    try:
        return msgspec.convert(saved, prepared(_Fingerprint)), msgspec.convert(present, _Fingerprint)
    except (msgspec.ValidationError, UnicodeError):
        return None


def _few(words: list[str]) -> list[str]:
    return words if len(words) <= _MAX_WORDS else [*words[:_MAX_WORDS], f"and {len(words) - _MAX_WORDS} more"]


def content_changes(saved: Any, present: Any) -> list[str]:
    """Why two fingerprints of data, whose names differ, are not known to be of the same rows; empty where they are.

    They are where the files have the same sizes and the same content, sampled, in the same order.
    """
    pair = _fingerprints(saved, present)
    if pair is None:
        return ["this kind of data is not known by its content"]

    before, after = pair
    if before.num_files != after.num_files:
        return [f"{before.num_files} -> {after.num_files} files"]

    if before.files and after.files:
        return _few(_content_changes(before, after))

    if before.content is None or after.content is None:
        return [f"{_size(before)}: the snapshot does not know their content apart from their names"]

    return [] if before.content == after.content else [f"{_size(before)} -> {_size(after)}, of other content"]


def _content_changes(before: _Fingerprint, after: _Fingerprint) -> list[str]:
    words = []
    for number, (old, new) in enumerate(zip(before.files, after.files, strict=False), 1):
        if old[1:] != new[1:]:
            was = f"file {number} was {old[0]} ({old[1]} bytes) and is {new[0]} ({new[1]} bytes)"
            words.append(was if old[1] != new[1] else f"{was}, of other content")
    return words


def _file_changes(before: _Fingerprint, after: _Fingerprint) -> list[str]:
    olds = {name: (num_bytes, sample) for name, num_bytes, sample in before.files}
    news = {name: (num_bytes, sample) for name, num_bytes, sample in after.files}
    if len(olds) != len(before.files) or len(news) != len(after.files):
        return _place_changes(before, after)

    words = [_change(name, olds[name], news[name]) for name in olds if name in news and olds[name] != news[name]]
    words += [f"{name} is missing" for name in olds if name not in news]
    words += [f"{name} is new" for name in news if name not in olds]
    if not words and list(olds) != list(news):
        words = [f"the files come in another order ({', '.join(list(olds)[:3])} -> {', '.join(list(news)[:3])})"]
    return words


def _place_changes(before: _Fingerprint, after: _Fingerprint) -> list[str]:
    """Where names repeat, as in ``a/train.jsonl b/train.jsonl``, a file is known by its place."""
    words = [] if before.num_files == after.num_files else [f"{before.num_files} -> {after.num_files} files"]
    for number, (old, new) in enumerate(zip(before.files, after.files, strict=False), 1):
        if old[0] != new[0]:
            words.append(f"file {number} was {old[0]} and is {new[0]}")
        elif old != new:
            words.append(_change(f"{new[0]} (file {number})", old[1:], new[1:]))
    return words


def _change(name: str, old: tuple[int, str], new: tuple[int, str]) -> str:
    if old[0] != new[0]:
        return f"{name} size {old[0]} -> {new[0]} bytes"

    return f"{name} has other content (size {new[0]} as before)"


def _size(fingerprint: _Fingerprint) -> str:
    return f"{fingerprint.num_files} files of {fingerprint.num_bytes} bytes"


_log = get_logger(__name__)
_DECODER = msgspec.msgpack.Decoder(list[msgspec.Raw])


def ledger_of(saved: Snapshot, now: Ledger, *, digest: str, group_size: int, files: Mapping[str, FileRefs]) -> Ledger:
    """The ledger that ``saved`` was taken of; what was leased then waits in the buffer.

    :param now: the present one: the progress of packing is restored later, and rules for rollouts are those of now.
    :param digest: what the running digest is of from now on.
    :param group_size: samples of a group.
    :param files: those of now of each part that has the same rows. Groups are of the files' present paths from now on.
    :raises ConfigError: if groups in the snapshot have another number of samples.
    :raises SnapshotError: if a value in it cannot be read.
    """
    excluded = dict.fromkeys(saved.excluded or (), Position())
    known = [(part, at, path) for part, at, path in saved.group_files or () if at < len(files.get(part, ()))]
    moved = {(part, path): files[part][at].path for part, at, path in known if files[part][at].path != path}
    returned = [_returned(record, group_size) for record in (*saved.leases, *saved.buffer)]
    return Ledger(
        position=Position(*saved.position),
        counters=_counters(saved, digest),
        buffer=tuple(_moved(item, moved) for item in returned) if moved else tuple(returned),
        group_files=frozenset((part, at, files[part][at].path) for part, at, _ in known),
        acked=frozenset(Position(*place) for place in saved.acked),
        journal=frozenset(saved.journal),
        group_drops=dict(saved.group_drops or {}),
        excluded=excluded | {(file, offset): Position(*place) for file, offset, *place in saved.excluded_late or ()},
        served=saved.served or Served(),
        rollouts=_rollouts(saved, now),
        packs=now.packs._replace(delivered=saved.packing.delivered) if now.packs and saved.packing else now.packs,
    )


def _rollouts(saved: Snapshot, now: Ledger) -> Rollouts | None:
    if not saved.rollouts and now.rollouts is None:
        return None

    from asyncdata.delivery.rollouts import Rollouts, RolloutState  # only where groups are tracked or have versions

    state: RolloutState = saved.rollouts or RolloutState()
    return state.restored(now.rollouts or Rollouts())


def _counters(saved: Snapshot, of: str) -> Counters:
    digest = saved_digest(saved).resumed(of)
    try:
        return structs.replace(msgspec.convert(saved.counters, prepared(Counters)), digest=digest)
    except Exception as error:  # a crafted value may make the converter raise anything
        raise SnapshotError(f"AD602 the snapshot's counters cannot be read: {error}") from error


def saved_digest(saved: Snapshot) -> StreamDigest:
    """The running digest of a snapshot.

    :raises SnapshotError: AD602, if it is not laid out as one, or does not cover the run from its first sample on.
    """
    found = saved.counters.get("digest")
    if found is None or (isinstance(found, dict) and found.get("first")):  # samples before it began
        raise SnapshotError(
            "AD602 this snapshot has no digest of the whole run: a development build wrote it. Finish the run with "
            "that build, or begin anew"
        )

    try:
        return msgspec.convert(found, prepared(StreamDigest))
    except Exception as error:
        raise SnapshotError(f"AD602 the digest in a snapshot is not laid out as one: {error}") from error


def _returned(record: str | list[dict[str, Any]], size: int) -> Returned:
    try:
        number = len(_DECODER.decode(a2b_base64(record, strict_mode=True)) if isinstance(record, str) else record)
    except ValueError as error:
        raise SnapshotError(f"AD602 a group in the snapshot's buffer cannot be read: {error}") from error

    if not number:
        raise SnapshotError("AD602 a group in the snapshot's buffer cannot be read: it has no sample")

    if number != size:
        raise ConfigError(
            f"the snapshot's buffer has groups of {number} samples, and n_samples_per_prompt is {size}; serve "
            "them with the old setting first"
        )

    item = Returned(None, record)
    return item if isinstance(record, str) or item.group else item


def _moved(item: Returned, paths: Mapping[tuple[str, str], str]) -> Returned:
    """A group whose samples name the present paths of their files."""
    for sample in item.group:
        path = sample.source and paths.get((sample.source_name or "", sample.source.path))
        if sample.source and path:
            sample.source = structs.replace(sample.source, path=path)
    return Returned(item.group, record_of(item.group))


def epoch_to_begin(saved: Snapshot, ledger: Ledger, changed: Collection[str]) -> int:
    """The epoch to begin with if the saved position is not valid: the next, unless the saved one had not begun.

    Logs what is left out of the saved epoch.
    """
    place = ledger.position
    num_delivered: int | None = ledger.counters.epoch_groups
    num_left_out = None if saved.rows_left is msgspec.UNSET else saved.rows_left
    if saved.packing:  # rows after the saved position may be in packs that are delivered already
        num_delivered, num_left_out = saved.packing.epoch_packs, None
        place = Position(saved.packing.epoch, row=num_delivered)  # in packs
    elif (reached := ledger.served.positions.get("", place)) > place:  # groups that were out are not known any more
        place, num_delivered, num_left_out = reached, None, None
    epoch = place.epoch
    if place == Position(epoch) and num_delivered is not None:
        return epoch

    _log.warning(
        "snapshot.rows_left_out",
        epoch=epoch,
        changed=sorted(changed),
        num_delivered=num_delivered,
        num_left_out=num_left_out,
    )
    return epoch + (place > Position(epoch))


def ledger_at_row(ledger: Ledger, epoch: int, row: int, group_index: int | None, group_size: int) -> Ledger:
    """The ledger of an epoch's start, moved to row ``row`` of its order of single rows.

    :param group_index: of the next group; None: as in ``ledger``.
    """
    counters = structs.replace(ledger.counters, epoch_groups=row)
    if group_index is not None:
        counters = structs.replace(counters, num_groups=group_index, num_samples=group_index * group_size)
    position = Position(epoch, *divmod(row, ROWS_PER_WINDOW))
    return structs.replace(ledger, position=position, counters=counters, served=Served())
