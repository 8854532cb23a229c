"""Deals the chunks of D to the ranks of a node as they come: who first needs a chunk claims and tokenizes it.

The way of a chunk: the producer offers it. If this rank claims it, its workers tokenize it, and the reply is published
for the others. If another rank has claimed it, its place in the order waits for that rank's word, and the reply is then
read from shared memory. If that rank has died, or is silent for too long, the chunk is claimed once more.

All ranks cut the same chunks: how many rows they have is agreed for each page of a window, by who comes there first.
Whatever fails here, a rank tokenizes the chunk by itself; D does not depend on it.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import anyio
import msgspec

from asyncdata.core.callbacks import no_op
from asyncdata.core.framing import pieces
from asyncdata.core.log import get_logger
from asyncdata.core.messages import Failed, Tokenized, decode_reply, encode
from asyncdata.prefetch.chunk_size import MAX_CHUNK_ROWS, chunk_limit
from asyncdata.prefetch.node_share.links import Links
from asyncdata.workers.base import Crashed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from asyncdata.core.messages import Data, Reply
    from asyncdata.prefetch.node_share.folder import NodeFolder, Place
    from asyncdata.workers.slots import Slots

__all__ = ("Offer", "Sharing")

_log = get_logger(__name__)
_PAGE_ROWS = MAX_CHUNK_ROWS


class Offer(NamedTuple):
    """A chunk that some rank must tokenize.

    :ivar name: says which rows of which window they are.
    :ivar slot: the slot with their bytes: it stays in use until the chunk is submitted or delivered.
    :ivar submit: has it tokenized here. Its argument is the claim, to be given to :meth:`Sharing.answered` with the
        reply; empty: the reply is not shared.
    :ivar deliver: takes the reply of another rank, or how its workers were lost.
    """

    name: str
    place: Place
    num_rows: int
    slot: int
    submit: Callable[[str], object]
    deliver: Callable[[Tokenized | Crashed], object]


class _Kept(NamedTuple):
    """What this rank has put into the folder. It is needed by ranks that have not reached ``place``."""

    claim: str
    place: Place
    num_bytes: int


class Sharing:
    """One rank's part. All methods are called in the service's thread.

    :param open_folder: joins the folder of the job.
    :param num_ranks: how many ranks of this node there are.
    :param max_bytes: what the replies of this rank may take in shared memory; of what is free there, all ranks take
        half at most.
    :param patience_s: seconds after which a rank that does not answer is not waited for.
    :ivar num_rows_taken: rows that other ranks have tokenized for this one.
    :ivar num_rows_unshared: rows tokenized here that could not be shared.
    :ivar on_change: called after the word of another rank, when its replies are delivered.
    """

    def __init__(
        self, open_folder: Callable[[], NodeFolder], num_ranks: int, max_bytes: int, patience_s: float, slots: Slots
    ) -> None:
        self.num_rows_taken = self.num_rows_unshared = 0
        self.on_change: Callable[[], object] = no_op
        self._open_folder = open_folder
        self._num_ranks = num_ranks
        self._max_bytes = max_bytes
        self._patience_s = patience_s
        self._slots = slots
        self._folder: NodeFolder | None = None
        self._links: Links | None = None
        self._scope: anyio.CancelScope | None = None
        self._waiting: dict[str, tuple[str, Offer]] = {}  # by the offer's name, with the member that it waits for
        self._claims: dict[str, Place] = {}
        self._kept: deque[_Kept] = deque()
        self._num_bytes = 0
        self._was_full = False
        self._next: Place = (0, 0, 0)
        self._page: tuple[Place, int] = ((-1, 0, 0), 1)

    async def run(self, on_joined: Callable[[], object]) -> None:
        """Join the others, call ``on_joined``, and take part until cancelled or until it fails."""
        try:
            self._folder = self._open_folder()
            self._max_bytes = min(self._max_bytes, self._folder.room() // (2 * self._num_ranks))
            links = self._links = Links(self._folder, self._on_word, self._patience_s)
            with anyio.CancelScope() as self._scope:
                await links.run(on_joined)
        except OSError as error:
            self._give_up(error)
        finally:
            self._links = None
            if self._folder is not None:
                self._folder.leave()
            on_joined()

    def _give_up(self, error: OSError) -> None:
        """Take no part any more, after one warning. The others see that this rank has left."""
        _log.warning("ranks.not_shared", reason=f"{error.filename or 'shared memory'}: {error.strerror or error}")
        if self._scope is not None:
            self._scope.cancel()
        self._links = None
        self._claims.clear()
        waiting, self._waiting = self._waiting, {}
        for _, offer in waiting.values():
            self._submit_unshared(offer)
            self._slots.done(offer.slot)

    def _submit_unshared(self, offer: Offer) -> None:
        self.num_rows_unshared += offer.num_rows
        offer.submit("")

    @property
    def num_rows_awaited(self) -> int:
        """Rows that other ranks are tokenizing for this one. From any thread."""
        return sum(offer.num_rows for _, offer in list(self._waiting.values()))

    # The producer's side.

    def num_rows_at(self, place: Place, wanted: int, capacity: int, num_workers: int) -> int | None:
        """Rows of the chunk that begins at ``place``; None if every rank may choose.

        :param wanted: how many this rank would choose.
        """
        epoch, window, row = place
        page = epoch, window, row // _PAGE_ROWS
        if self._page[0] != page:
            wanted = min(wanted, chunk_limit(capacity, num_workers * self._num_ranks))
            self._page = page, self._agreed(page, 1 << (wanted.bit_length() - 1))
        return None if self._links is None else self._page[1] - row % self._page[1]

    def _agreed(self, page: Place, num_rows: int) -> int:
        if self._links is None or self._folder is None:
            return num_rows

        name = "p{}-{}-{}".format(*page)
        try:
            found = self._folder.claim(name, str(num_rows))
        except OSError as error:
            self._give_up(error)
            return num_rows

        if found:
            return max(1, int(found.rpartition("/")[2]))

        self._kept.append(_Kept(name, (*page[:2], (page[2] + 1) * _PAGE_ROWS - 1), 0))
        return num_rows

    def offer(self, offer: Offer) -> None:
        """Have the chunk tokenized here or by another rank: at once, or later, one of its functions is called."""
        self._next = (*offer.place[:2], offer.place[2] + offer.num_rows)
        if self._links is None:
            self._submit_unshared(offer)
        elif self._was_full and not self._links.num_members:
            offer.submit("")  # no other rank has come to read what was kept
        else:
            self._slots.use(offer.slot)
            self._settle(offer)
            self._mark()

    def _settle(self, offer: Offer) -> None:
        """Claim the chunk, or deliver its reply, or wait for it."""
        self._waiting.pop(offer.name, None)
        try:
            owner = self._owner(offer)
        except OSError as error:
            self._waiting[offer.name] = "", offer
            self._give_up(error)
            return

        if owner:
            self._waiting[offer.name] = owner, offer
        else:
            self._slots.done(offer.slot)

    def _owner(self, offer: Offer) -> str:
        """The member that is waited for; empty if the chunk was submitted or delivered."""
        assert self._folder is not None
        assert self._links is not None
        for number in count():
            claim = f"{offer.name}.{number}"
            found = self._folder.claim(claim)
            if not found:
                self._claims[claim] = offer.place
                offer.submit(claim)
                return ""

            owner, body = found.partition("/")[0], self._folder.read(claim)
            if body is not None:
                self._take(offer, body)
                return ""

            if self._links.awaits(owner):
                return owner

        raise AssertionError("count() has no end")

    def _take(self, offer: Offer, body: memoryview) -> None:
        """Deliver what another rank has published. Nothing: its request failed, which does not concern this rank."""
        reply = None
        with suppress(msgspec.DecodeError):  # its memory was cut off or overwritten
            reply = decode_reply(body) if body else None
        if isinstance(reply, Tokenized):
            self.num_rows_taken += offer.num_rows
            offer.deliver(reply)
        elif isinstance(reply, Failed):
            offer.deliver(Crashed(reply.kind, reply.message, reply.row if reply.row >= 0 else None))
        else:
            self._submit_unshared(offer)

    def answered(self, claim: str, reply: Reply | Crashed) -> None:
        """Publish the reply of a claimed chunk."""
        place = self._claims.pop(claim, None)
        if place is None or self._folder is None or self._links is None:
            return

        try:
            num_bytes = self._folder.publish(claim, _body_of(reply))
            self._links.tell()
            self._kept.append(_Kept(claim, place, num_bytes))
            self._num_bytes += num_bytes
            self._drop_read(self._folder, self._links)
        except OSError as error:
            self._give_up(error)

    def _drop_read(self, folder: NodeFolder, links: Links) -> None:
        """Remove what all ranks have read; and the oldest, if there is too much. A missing rank may still come."""
        are_all_here = links.num_members >= self._num_ranks - 1
        reached = min(self._next, links.reached()) if are_all_here else (0, 0, 0)
        while self._kept and (self._kept[0].place < reached or self._num_bytes > self._max_bytes):
            kept = self._kept.popleft()
            self._was_full |= kept.place >= reached
            self._num_bytes -= kept.num_bytes
            folder.drop(kept.claim)

    def forget(self) -> None:
        """The producer starts again from another place: drop all offers, and give claims back."""
        claims, self._claims = self._claims, {}
        waiting, self._waiting = self._waiting, {}
        for _, offer in waiting.values():
            self._slots.done(offer.slot)
        if self._folder is None or self._links is None:
            return

        try:
            for claim in claims:
                self._folder.drop(claim)
        except OSError as error:
            self._give_up(error)
        else:
            self._links.tell()

    def _on_word(self, member: str) -> None:
        for owner, offer in list(self._waiting.values()):
            if owner == member and offer.name in self._waiting:
                self._settle(offer)
        self._mark()
        self.on_change()

    def _mark(self) -> None:
        """Tell the others what is not needed here any more."""
        if self._folder is not None and self._links is not None:
            self._folder.reach(min([self._next, *(offer.place for _, offer in self._waiting.values())]))


def _body_of(reply: Reply | Crashed) -> Sequence[Data | bytearray]:
    """What is published: samples, and rows that kill workers, so that they need not kill those of every rank."""
    if isinstance(reply, Tokenized):
        return pieces(0, reply)[1:]

    if isinstance(reply, Crashed):
        return [encode(Failed(reply.code, reply.reason, row=-1 if reply.row is None else reply.row))]

    return []
