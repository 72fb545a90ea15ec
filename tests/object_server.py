"""A server of the files of a folder, or of another server's objects, that is slow, fails and damages as a test says."""

import random
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Store(ThreadingHTTPServer):
    """GET and HEAD of objects, with ranges, as S3 and any server of files answer them."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, source):
        """source: a folder, or the http:// address of a server that is asked in turn."""
        super().__init__(("127.0.0.1", 0), Handler)
        self.source, self.url = source, f"http://127.0.0.1:{self.server_port}"
        self.lock = threading.Lock()
        self.be_sound()

    def be_sound(self):
        """Be quick and right, and forget what was asked for."""
        self.latency, self.failing, self.damage = 0.0, 0.0, lambda path, start, data: data
        self.asked, self.rng = [], random.Random(0)

    def ranges(self, name):
        """The (start, end) of the bytes that were asked for of an object of this name."""
        return [(start, end) for path, start, end in self.asked if path.endswith(f"/{name}")]

    def find(self, path, start, end, headers):
        """(the bytes [start, end) of an object, its size), None for one that is not there.

        headers: of the request, of which another server is told who asks.
        """
        if isinstance(self.source, Path):
            file = self.source / path.lstrip("/")
            if not file.is_file():
                return None
            whole = file.read_bytes()
            return whole[start:end], len(whole)
        request = urllib.request.Request(self.source + path)
        for name in ("Authorization", "x-amz-date", "x-amz-content-sha256"):
            if headers.get(name):
                request.add_header(name, headers[name])
        if end is not None:
            request.add_header("Range", f"bytes={start}-{end - 1}")
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                data = answer.read()
                return data, int((answer.headers.get("Content-Range") or f"/{len(data)}").split("/")[1])
        except urllib.error.HTTPError:
            return None


class Handler(BaseHTTPRequestHandler):
    """Of one request."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # head and content in one packet
    disable_nagle_algorithm = True

    def log_message(self, *_):
        """Say nothing."""

    def answer(self, code, data=b"", **headers):
        self.send_response(code)
        for name, value in {"Content-Length": len(data), **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_GET(self):
        store, asked = self.server, self.headers.get("Range")
        start, end = 0, None
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), int(last) + 1 if last else None
        time.sleep(store.latency)
        with store.lock:
            store.asked.append((self.path, start, end))
            fails = store.rng.random() < store.failing
        if fails:
            return self.answer(503)
        found = store.find(self.path, start, end, self.headers)
        if found is None:
            return self.answer(404)
        data, size = found
        if not asked:
            return self.answer(200, store.damage(self.path, 0, data), ETag='"1"')
        if start >= size:
            return self.answer(416, Content_Range=f"bytes */{size}")
        where = f"bytes {start}-{start + len(data) - 1}/{size}"
        return self.answer(206, store.damage(self.path, start, data), Content_Range=where, ETag='"1"')

    do_HEAD = do_GET


@contextmanager
def serving(source):
    """A Store that answers until the context ends."""
    store = Store(source)
    thread = threading.Thread(target=lambda: store.serve_forever(0.01), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.shutdown()
        store.server_close()
        thread.join()
