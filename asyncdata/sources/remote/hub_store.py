"""Data sets and buckets of the Hugging Face hub, by huggingface_hub.

The hub answers a request for bytes with a redirection to where they lie; this place is kept for further reads of the
same file, as the hub limits how often it may be asked.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple, NoReturn
from urllib.parse import quote, unquote, urljoin

from asyncdata.core.errors import ConfigError, SourceError
from asyncdata.core.identity import Address
from asyncdata.sources.paths import GivenAddress
from asyncdata.sources.remote.store import ObjectStamp, Store, StoreError, is_throttled, kind_of_status

_KEY = re.compile(r"([^/@]+/[^/@]+)(?:@(refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(.*))?", re.DOTALL)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_RESET = re.compile(r";\s*t=(\d+)")
_TIMEOUT_S = 30.0
_MAX_PLACES = 10_000
"""Places that are kept: each is an address of about 1 KB."""
_MOVED = frozenset({301, 302, 303, 307, 308})
_OPTIONS = ("endpoint", "token")


class _Key(NamedTuple):
    """What a key of ``hf://datasets`` or ``hf://buckets`` names."""

    repo: str
    revision: str
    path: str


class HubStore(Store):
    """See :class:`~asyncdata.sources.remote.store.Store`. A key is ``user/name@revision/path``, or, in a bucket,
    ``user/name/path``.

    :param url: ``hf://datasets`` or ``hf://buckets``.
    :param options: ``endpoint`` and ``token``; without them, huggingface_hub's.
    :raises ConfigError: AD340 if huggingface_hub is not installed, or has no buckets; AD341 for another url or option.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self._root = GivenAddress.parse(url).address
        if self._root.bucket not in {"datasets", "buckets"}:
            raise ConfigError(
                f"AD341 {self._root.root}: data on the hub is hf://datasets/user/name@revision/path or "
                "hf://buckets/user/name/path"
            )

        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown:
            raise ConfigError(f"AD341 hf:// has no option {', '.join(unknown)}; it has {' and '.join(_OPTIONS)}")

        try:
            import huggingface_hub as hub
            from huggingface_hub.utils import get_session
        except ImportError as error:
            raise ConfigError(f"AD340 hf:// needs huggingface_hub ({error}): pip install huggingface_hub") from error

        self._errors = hub.errors
        self._session = get_session
        self._api: Any = hub.HfApi(endpoint=options.get("endpoint"), token=options.get("token"))
        self._is_bucket = self._root.bucket == "buckets"
        if self._is_bucket and not hasattr(self._api, "list_bucket_tree"):
            raise ConfigError(
                f"AD340 huggingface_hub {hub.__version__} has no buckets: pip install --upgrade huggingface_hub"
            )

        self._places: dict[str, str] = {}
        self._commits: dict[tuple[str, str], str] = {}
        self._lock = threading.Lock()

    def pinned(self, key: str) -> str:
        """The key with the commit that its revision is now."""
        named = self._key(key)
        if self._is_bucket or _COMMIT.fullmatch(named.revision):
            return key

        with self._lock:  # asked once, so that all files of a run are of one commit
            commit = self._commits.get((named.repo, named.revision))
            if commit is None:
                with self._refusing():
                    commit = self._api.dataset_info(named.repo, revision=named.revision, timeout=_TIMEOUT_S).sha
                self._commits[named.repo, named.revision] = commit
        return f"{named.repo}@{commit}/{named.path}"

    def list(self, prefix: str) -> Iterable[ObjectStamp]:
        named = self._key(prefix)
        folder = named.path.rpartition("/")[0] or None
        with self._refusing():
            if self._is_bucket:
                tree = self._api.list_bucket_tree(named.repo, folder, recursive=True)
            else:
                at_commit = {"revision": named.revision, "repo_type": "dataset", "expand": False}
                tree = self._api.list_repo_tree(named.repo, folder, recursive=True, **at_commit)
            found = [self._stamp(named, entry) for entry in tree if hasattr(entry, "size")]
        return [stamp for stamp in found if stamp.address.key.startswith(self._text(named))]

    def head(self, key: str) -> ObjectStamp:
        named = self._key(key)
        with self._refusing():
            if self._is_bucket:
                entries = self._look_in_bucket(named)
            else:
                at_commit = {"revision": named.revision, "repo_type": "dataset"}
                entries = self._api.get_paths_info(named.repo, [named.path], **at_commit)
            found = [entry for entry in entries if hasattr(entry, "size") and entry.path == named.path]
        if not found:
            raise StoreError("missing", "there is no such file")

        return self._stamp(named, found[0])

    def read(self, found: ObjectStamp, start: int, stop: int) -> bytes:
        key = found.address.key
        place = self._places.get(key)
        headers = {"range": f"bytes={start}-{stop - 1}", "accept-encoding": "identity"}
        response = self._ask(place, headers) if place else self._ask_hub(found, headers)
        if place and response.status_code in {401, 403, 404, 410}:  # a signed address ends
            with self._lock:
                self._places.pop(key, None)
            response = self._ask_hub(found, headers)
        if response.status_code != 206 and not (response.status_code == 200 and stop - start == found.num_bytes):
            self._refuse(response)
        data: bytes = response.content
        told = _RANGE.match(response.headers.get("content-range", ""))
        if told is not None and int(told[3]) != found.num_bytes:
            raise StoreError("changed", f"it has {told[3]} bytes")

        if len(data) != stop - start or (told is not None and (int(told[1]), int(told[2])) != (start, stop - 1)):
            raise StoreError("transient", f"the answer has {len(data)} bytes, not those of {start}-{stop}")

        return data

    def write(self, key: str, data: bytes) -> None:
        """Refused: a loader makes no commits."""
        raise StoreError("permanent", "nothing is written to the hub; choose another place")

    def copy(self, key: str, to: str) -> None:
        """Refused, as :meth:`write` is."""
        self.write(to, b"")

    def close(self) -> None:
        """Forget places; connections belong to huggingface_hub."""
        self._places.clear()

    def _ask_hub(self, found: ObjectStamp, headers: Mapping[str, str]) -> Any:
        """Ask the hub for bytes, and the place that it names; keep this place."""
        named = self._key(found.address.key)
        if self._is_bucket:
            url = f"{self._api.endpoint}/buckets/{named.repo}/resolve/{quote(named.path)}"
        else:
            url = f"{self._api.endpoint}/datasets/{named.repo}/resolve/{named.revision}/{quote(named.path)}"
        own = self._headers()
        response = self._ask(url, {**own, **headers})
        for _ in range(3):  # a renamed repository is a redirection within the hub
            if response.status_code not in _MOVED:
                return response

            place = urljoin(url, response.headers["location"])
            now = (response.headers.get("x-xet-hash") or response.headers.get("x-linked-etag", "")).strip('"')
            if self._is_bucket and now and now != found.etag:
                raise StoreError("changed", f"its hash is now {now}")

            is_hub = place.startswith(f"{self._api.endpoint}/datasets/")
            if not is_hub:
                with self._lock:
                    while len(self._places) >= _MAX_PLACES:
                        del self._places[next(iter(self._places))]
                    self._places[found.address.key] = place
            response = self._ask(place, {**own, **headers} if is_hub else headers)
        return response

    def _ask(self, url: str, headers: Mapping[str, str]) -> Any:
        with self._refusing():
            return self._session().get(url, headers=dict(headers), timeout=_TIMEOUT_S, follow_redirects=False)

    def _headers(self) -> dict[str, str]:
        from huggingface_hub.utils import build_hf_headers

        return dict(build_hf_headers(token=self._api.token, library_name="asyncdata"))

    def _look_in_bucket(self, named: _Key) -> Iterable[Any]:
        """One request. huggingface_hub's own function for it tries six times, for 23 s and more; these tries are not
        counted, and go on when the loader is closed.
        """
        from huggingface_hub import BucketFile

        url = f"{self._api.endpoint}/api/buckets/{named.repo}/paths-info"
        asked = {"paths": [named.path]}
        response = self._session().post(url, json=asked, headers=self._headers(), timeout=_TIMEOUT_S)
        if response.status_code != 200:
            self._refuse(response)

        return [BucketFile(**entry) for entry in response.json()]

    def _key(self, key: str) -> _Key:
        found = _KEY.fullmatch(key)
        if found is None or (self._is_bucket and found[2]):
            form = "hf://buckets/user/name/path" if self._is_bucket else "hf://datasets/user/name@revision/path"
            raise SourceError(f"AD341 {self._root.root}/{key} is not {form}")

        return _Key(found[1], unquote(found[2] or "main"), found[3] or "")

    def _text(self, named: _Key) -> str:
        revision = "" if self._is_bucket else f"@{quote(named.revision, safe='')}"
        return f"{named.repo}{revision}/{named.path}"

    def _stamp(self, named: _Key, entry: Any) -> ObjectStamp:
        address = Address(self._root.scheme, self._root.bucket, self._text(named._replace(path=entry.path)))
        if self._is_bucket:
            return ObjectStamp(address, entry.size, entry.xet_hash)

        lfs = entry.lfs
        return ObjectStamp(address, entry.size, lfs.sha256 if lfs is not None else entry.blob_id, named.revision)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Raise what has happened, without addresses that have a signature."""
        try:
            yield
        except Exception as error:
            response = getattr(error, "response", None)
            if response is not None:
                self._refuse(response)

            if isinstance(error, self._errors.EntryNotFoundError | self._errors.RepositoryNotFoundError):
                raise StoreError("missing", type(error).__name__) from None

            names = {kind.__name__ for kind in type(error).__mro__}
            if "OfflineModeIsEnabled" in names:
                raise StoreError("permanent", "HF_HUB_OFFLINE is set, so the hub is not asked") from None

            if names & {"RequestError", "ConnectionError", "TimeoutError", "RequestException"}:
                raise StoreError("transient", type(error).__name__) from None

            raise

    def _refuse(self, response: Any) -> NoReturn:
        status, headers = response.status_code, response.headers
        kind = "transient" if status < 300 else kind_of_status(status)
        if kind == "missing" and self._api.token is None and headers.get("x-error-code") == "RepoNotFound":
            kind = "denied"  # what is private is not told from what does not exist
        raise StoreError(
            kind,
            f"status {status} {headers.get('x-error-code', '')}".rstrip(),
            request_id=headers.get("x-request-id", ""),
            retry_after_s=wait_asked_s(headers, time.time()),
            is_throttled=is_throttled(status),
        )


def wait_asked_s(headers: Mapping[str, str], now: float) -> float:
    """How long an answer asks to wait, in seconds: by ``Retry-After`` (seconds or a date), or by the hub's own
    ``RateLimit``, whose ``t`` is when requests are allowed again. 0 if it does not say.

    :param now: the time, in seconds since 1970.
    """
    after = headers.get("retry-after", "")
    if after.isdigit():
        return float(after)

    if after:
        try:
            return max(0.0, parsedate_to_datetime(after).timestamp() - now)
        except ValueError:
            return 0.0

    reset = _RESET.search(headers.get("ratelimit", ""))
    return float(reset[1]) if reset else 0.0
