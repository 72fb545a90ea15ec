"""Small text files in a local folder or below a URL that tensorstore supports, replaced atomically; and objects.

s3://bucket/path    the endpoint of another store than Amazon's is $AWS_ENDPOINT_URL_S3 or $AWS_ENDPOINT_URL; the region
                    is $AWS_REGION or $AWS_DEFAULT_REGION; credentials are $AWS_ACCESS_KEY_ID and
                    $AWS_SECRET_ACCESS_KEY, else those of the profile, the container or the instance
gs://bucket/path    with Google's application default credentials
http://host/path    of a server that gives ranges of bytes, and https://; to read alone
file:///path        files, each put in place by a rename and durable then
memory://name       of this process alone
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard
from urllib.parse import quote, unquote, urlsplit

from fzero.core.files import make_folder, replacing
from fzero.core.text_parsing import read_text_file

# tensorstore itself waits without end for a server that does not answer.
WAIT_S = 30.0  # the timeout of a transfer, plus as much again for every SLOWEST bytes
SLOWEST = 8 << 20  # bytes
# An unreachable store is reported after about 10 s; one that asks for slower requests gets them.
RETRIES = {"max_retries": 5, "initial_delay": "300ms", "max_delay": "3s"}


LASTING = ("NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED")  # codes of errors that waiting does not mend


class Refused(OSError):
    """Raised where a store has no such bucket, or the user may not read or write there."""


def is_url(path: Any) -> TypeGuard[str]:
    """Whether `path` is a URL, such as gs://bucket/run/ or memory://run/, and not a local path."""
    return "://" in str(path)


def url_spec(url: str) -> Any:
    """tensorstore's specification of a URL: itself, or a table with what it cannot express (endpoint, region)."""
    parts = urlsplit(url)
    path = f"{unquote(parts.path).strip('/')}/".lstrip("/")
    if parts.scheme == "file":
        return {"driver": "file", "path": f"/{path}", "file_io_sync": True}
    if parts.scheme != "s3" or parts.query or parts.fragment:
        return url.rstrip("/") + "/"
    spec: dict[str, Any] = {"driver": "s3", "bucket": parts.netloc, "path": path}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec["endpoint"] = endpoint.rstrip("/")
    if region or endpoint:
        spec["aws_region"] = region or "us-east-1"
    if os.environ.get("AWS_ACCESS_KEY_ID") and os.environ.get("AWS_SECRET_ACCESS_KEY"):
        spec["aws_credentials"] = {
            "type": "environment"
        }  # otherwise tensorstore searches every source of credentials, some over the network
    return spec


@functools.cache
def context() -> Any:
    """The tensorstore context that everything in this process shares, so that memory:// URLs are one store."""
    import tensorstore

    return tensorstore.Context(
        {
            "file_io_concurrency": {"limit": 4},
            # Durable by one sync at the end (`sync_file_system`), which is faster than one per file.
            "file_io_sync": False,
            "file_io_locking": {"mode": "none"},  # each chunk has one writer: its rank
            # A chunk is read once, so that a cache would only take memory.
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": 2},
            "s3_request_retries": RETRIES,
            "gcs_request_retries": RETRIES,
            "http_request_retries": RETRIES,
        }
    )


class Objects:
    """The objects below a URL by name; thread-safe. Every failure is an OSError with a message of one line."""

    def __init__(self, url: str) -> None:
        import tensorstore

        self.url = str(url)
        try:
            self.kv = tensorstore.KvStore.open(url_spec(self.url), context=context()).result()
        except ValueError as error:
            reason = str(error).removeprefix(f'Parsing spec from url: "{self.url.rstrip("/")}/": ')
            raise ValueError(
                f"{self.url}: names no store ({reason}); use s3://bucket/path, gs://bucket/path or file:///path"
            ) from None

    def names(self) -> list[str]:
        """The names of all objects below the URL."""
        return [name.decode() for name in self._done(self.kv.list(), 0)]

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes | None:
        """The bytes [start, end) of an object, or None if there is none; raises EOFError if it is shorter."""
        # Of unknown size: time for 64 MiB.
        size = 64 << 20 if end is None else end - start
        return self.end_read(self.begin_read(name, start, end), size)

    def begin_read(self, name: str, start: int = 0, end: int | None = None) -> Any:
        """Begin to read the bytes [start, end) of an object, beside others; returns what `end_read` waits for."""
        return self.kv.read(name, byte_range=None if (start, end) == (0, None) else slice(start, end))

    def end_read(self, future: Any, size: int) -> bytes | None:
        """Wait for a read that `begin_read` began, of `size` bytes; returns and raises as `read` does."""
        result = self._done(future, size)
        return None if result.state == "missing" else result.value

    def write(self, name: str, data: bytes) -> None:
        """Replace an object atomically and durably."""
        self._done(self.kv.write(name, data), len(data))

    def remove(self, names: list[str]) -> None:
        """Remove objects; missing ones are ignored."""
        # All are started before any is waited for.
        for future in [self.kv.write(name, None) for name in names]:
            self._done(future, 0)

    def _done(self, future: Any, size: int) -> Any:
        wait_s = WAIT_S * (1 + size / SLOWEST)
        try:
            return future.result(timeout=wait_s)
        except TimeoutError:
            raise TimeoutError(f"{self.url}: no answer in {wait_s:.0f} s{hint('UNAVAILABLE')}") from None
        except ValueError as error:
            code, message = parse_error(str(error))
            if code == "OUT_OF_RANGE":
                raise EOFError(message) from None
            kind = Refused if code in LASTING else OSError
            raise kind(f"{self.url}: {message}{hint(code)}") from None


def parse_error(text: str) -> tuple[str, str]:
    """Split a tensorstore message `CODE: text [name='value'] ...` into (code, text)."""
    code, colon, message = text.partition(": ")
    if not colon or not re.fullmatch(r"[A-Z_]+", code):
        code, message = "", text
    bare = re.split(r" \[\w[\w-]*='", message)[0]
    bare = re.sub(r"^All \d+ retry attempts failed: ", "", bare)
    http = re.search(r"http_response_code='(\d+)'", message)
    return code, " ".join((bare if bare != "Unknown" or http is None else f"HTTP {http[1]}").split())


def hint(code: str) -> str:
    """A hint on how to mend an error with this code, or ""."""
    return {
        "NOT_FOUND": "; create the bucket, or name another one",
        "PERMISSION_DENIED": "; check the credentials, and what they allow",
        "UNAUTHENTICATED": "; check the credentials",
        "ABORTED": "; check the network, and for s3:// $AWS_ENDPOINT_URL",
        "UNAVAILABLE": "; check the network, and for s3:// $AWS_ENDPOINT_URL",
        "DEADLINE_EXCEEDED": "; check the network, and for s3:// $AWS_ENDPOINT_URL",
    }.get(code, "")


Folder = str | Path  # a local folder, or the URL of one that tensorstore knows
PAGE = 4096  # bytes: a direct transfer to or from a disk begins and ends at a multiple of this


class Damaged(ValueError):
    """Raised if a store or checkpoint is corrupt, or holds no whole step.

    Another checkpoint may be read instead: see `newest_sound`.

    >>> import tempfile
    >>> path = fzero.checkpoint.save(tempfile.mkdtemp(), {"w": torch.ones(2)}, step=10)
    >>> _ = (path / "manifest.json").write_text("{}")
    >>> fzero.checkpoint.restore(path, {"w": torch.empty(2)})
    Traceback (most recent call last):
    fzero.core.storage.Damaged: ...manifest.json: damaged, or not a manifest of fzero: ...
    """


USERS = {"XDG_CACHE_HOME": ".cache", "XDG_CONFIG_HOME": ".config"}


def user_folder(variable: str) -> Path:
    """fzero's part of the user's folder of caches ($XDG_CACHE_HOME) or settings ($XDG_CONFIG_HOME)."""
    if named := os.environ.get(variable):
        return Path(named, "fzero")
    try:
        base = Path.home()
    except RuntimeError:
        base = Path(tempfile.gettempdir(), f"fzero-{os.getuid()}")
    return base / USERS[variable] / "fzero"


def kvstore(folder: str | Path, *path: str) -> Any:
    """tensorstore's specification of the folder `path` below `folder`."""
    if is_url(folder):
        return url_spec("/".join((str(folder).rstrip("/"), *map(quote, path))))
    return {"driver": "file", "path": str(Path(folder, *path)) + "/"}


def join(folder: Folder, *names: str) -> Folder:
    """The path or URL of an entry below a folder; an empty name is that of the folder itself."""
    if is_url(folder):
        return "/".join((str(folder).rstrip("/"), *(quote(name) for name in names if name)))
    return Path(folder, *names)


def absolute(path: str | Path) -> str:
    """The absolute path of a folder, and a URL as it is.

    >>> absolute("s3://bucket/corpus"), absolute("/a/b")
    ('s3://bucket/corpus', '/a/b')
    """
    return str(path) if is_url(path) else str(Path(path).absolute())


def read_text(folder: str | Path, name: str) -> str | None:
    """The text `name`, or None if it does not exist; raises ValueError if it is no text or no regular file."""
    if is_url(folder):
        content = Objects(str(folder)).read(name)
        try:
            return None if content is None else content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder}/{name}: is not UTF-8 text ({error})") from None
    path = Path(folder, name)
    return read_text_file(path) if os.path.lexists(path) else None


def write_text(folder: str | Path, name: str, text: str) -> None:
    """Replace the text `name` atomically and durably: a reader finds all of the old text or all of the new one."""
    if is_url(folder):
        Objects(str(folder)).write(name, text.encode())
        return
    with replacing(Path(folder, name)) as file:
        file.write(text.encode())


def write_texts(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files {name: content}, as `write_text` does; names may have folders."""
    for name, content in files.items():
        *folders, last = name.split("/")
        write_text(make_folder(folder, *folders), last, content)


def sync_file_system(path: Path) -> None:
    """Make everything written to the file system of a local folder durable, by one syncfs."""
    fd = os.open(path, os.O_RDONLY)
    try:
        # Python has no syncfs.
        if ctypes.CDLL(None, use_errno=True).syncfs(fd):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(path))
    finally:
        os.close(fd)
