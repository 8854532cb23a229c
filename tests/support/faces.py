"""Both faces of a loader under the same names, so that one test holds for both."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

from asyncdata import AsyncDataLoader
from tests.support import loaders
from tests.support.loading import SHUFFLE
from tests.support.tokenize_fns import row_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Self

__all__ = ("FACES", "Awaited")


class Awaited:
    """An ``AsyncDataLoader`` with the names of a ``DataLoader``: every call is awaited in one event loop."""

    def __init__(self, source: Any, tokenize_fn: Any = row_id, **knobs: Any) -> None:
        knobs = {"shuffle": SHUFFLE, "num_workers": 0, "timeout_s": 240} | knobs
        self._loader = AsyncDataLoader(source, tokenize_fn=tokenize_fn, **knobs)
        self._runner = asyncio.Runner()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._loader, name)
        if not inspect.iscoroutinefunction(found):
            return found

        return lambda *args, **kwargs: self._runner.run(found(*args, **kwargs))

    def __iter__(self) -> Iterator[Any]:
        return _Loop(self._runner, aiter(self._loader))

    def close(self) -> None:
        """Close the loader; its last state may still be asked for."""
        self._runner.run(self._loader.aclose())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._runner.close()


class _Loop:
    """An ``async for``, step by step."""

    def __init__(self, runner: asyncio.Runner, loop: Any) -> None:
        self._runner, self._loop = runner, loop

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        async def step() -> Any:
            return await anext(self._loop)

        try:
            return self._runner.run(step())
        except StopAsyncIteration:
            raise StopIteration from None


FACES: dict[str, Callable[..., Any]] = {"DataLoader": loaders.make, "AsyncDataLoader": Awaited}
