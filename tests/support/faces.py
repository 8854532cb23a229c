"""Both faces of a loader under the same names, so that one test holds for both."""

import asyncio
import inspect

from asyncdata import AsyncDataLoader
from tests.support import loaders
from tests.support.tokenize_fns import row_id

__all__ = ("FACES", "Awaited")


class Awaited:
    """An ``AsyncDataLoader`` with the names of a ``DataLoader``: every call is awaited in one event loop."""

    def __init__(self, source, tokenize_fn=row_id, **knobs):
        self.loader = loaders.make(source, tokenize_fn, AsyncDataLoader, **knobs)
        self.runner = asyncio.Runner()

    def __getattr__(self, name):
        found = getattr(self.loader, name)
        if not inspect.iscoroutinefunction(found):
            return found
        return lambda *args, **kwargs: self.runner.run(found(*args, **kwargs))

    policy_version = property(
        lambda self: self.loader.policy_version, lambda self, version: setattr(self.loader, "policy_version", version)
    )

    def __iter__(self):
        return self._stepped(aiter(self.loader))

    def groups(self, **limits):
        return self._stepped(aiter(self.loader.groups(**limits)))

    def _stepped(self, loop):
        """An ``async for``, step by step."""

        async def step():
            return await anext(loop)

        def next_batch():
            try:
                return self.runner.run(step())
            except StopAsyncIteration:
                raise StopIteration from None

        return iter(next_batch, object())

    def close(self):
        """Close the loader; its last state may still be asked for."""
        self.runner.run(self.loader.aclose())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
        self.runner.close()


FACES = {"DataLoader": loaders.make, "AsyncDataLoader": Awaited}
