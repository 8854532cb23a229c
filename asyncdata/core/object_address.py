"""The address of an object in a store, without what gives access to it. Runs without numpy."""

from __future__ import annotations

import msgspec

__all__ = ("HTTP", "Address")

HTTP = frozenset({"http", "https"})
"""The schemes whose keys are percent-encoded in an address."""


class Address(msgspec.Struct, frozen=True, array_like=True):
    """An object in a store, without what gives access to it.

    :ivar bucket: the bucket, the container, or the host with its port.
    :ivar key: the object's name in the bucket; as it is, not percent-encoded.
    """

    scheme: str
    bucket: str
    key: str

    @property
    def root(self) -> str:
        """The address of the bucket."""
        return f"{self.scheme}://{self.bucket}"

    def __str__(self) -> str:
        if self.scheme not in HTTP:
            return f"{self.root}/{self.key}"

        from urllib.parse import quote  # not at a worker's start

        return f"{self.root}/{quote(self.key, safe='/~:@!$()*,;=+&')}"

    def with_key(self, key: str) -> Address:
        """Another object of the same bucket."""
        return Address(self.scheme, self.bucket, key)
