"""An order for SkyRL's SFT, which a restart continues exactly: a class for its ``sampler_class_path``.

::

    sampler=custom sampler_class_path=asyncdata.integrations.skyrl_sft.OrderSampler sampler_kwargs={seed: 1}

SkyRL reads and tokenizes the rows. Its own sampler gives later epochs of a resumed run another order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from asyncdata.core.errors import SnapshotError, SnapshotMismatchError
from asyncdata.order.permutation import feistel_permutation, order_keys

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence, Sized

__all__ = ("OrderSampler",)

_AT_ONCE = 1024  # indices that are computed together


class OrderSampler:
    """Each index of the data once an epoch, in an order that only ``seed`` and the epoch decide.

    Its state is a few numbers, in ``data.pt`` of SkyRL's checkpoints; a restart costs the same at any place.

    :param tokenized: SkyRL's data set.
    :param lengths: of its parts, which SkyRL passes for several data sets: the order mixes all their rows.
    :param seed: of the order.
    """

    def __init__(self, tokenized: Sized, lengths: Sequence[int] = (), *, seed: int = 0) -> None:
        self._size = len(tokenized)
        self._seed = seed
        self._epoch = self._next = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        """The indices of the rest of this epoch. Only one iterator may be in use."""
        keys = order_keys(self._seed, self._epoch, "skyrl sft")
        while self._next < self._size:
            start = self._next
            places = np.arange(start, min(start + _AT_ONCE, self._size))
            for index in feistel_permutation(places, self._size, keys).tolist():
                self._next += 1
                yield index
        self._epoch, self._next = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """The state after the last index."""
        return {"epoch": self._epoch, "next_index": self._next, "num_rows": self._size, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with exactly the index that would have come next; after an epoch's last one, the next epoch.

        :raises SnapshotMismatchError: AD603, if the data have another number of rows, or the seed is another one.
        :raises SnapshotError: AD602, if it is the state of another sampler.
        """
        present = self.state_dict()
        if missing := sorted(present.keys() - state.keys()):
            raise SnapshotError(f"AD602 this is the state of another sampler: it has no {missing[0]!r}")

        for name, way_out in (("num_rows", "restore the data"), ("seed", "restore the seed in sampler_kwargs")):
            if state[name] != present[name]:
                raise SnapshotMismatchError(
                    f"AD603 the checkpoint has {name}={state[name]}, and the sampler {name}={present[name]}: {way_out}",
                    {name: (state[name], present[name])},
                )

        self._epoch, self._next = state["epoch"], state["next_index"]
        if self._next >= self._size:
            self._epoch, self._next = self._epoch + 1, 0
