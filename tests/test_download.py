"""Downloads from a real local server, including truncated, wrong and refused responses."""

from __future__ import annotations

import gc
import hashlib
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conftest import refusal
from waffle_fl import data
from waffle_fl.data.files import download
from waffle_fl.data.sources import SOURCES, File
from waffle_fl.errors import WaffleError

CONTENT = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8).tobytes()
SIZE = len(CONTENT)
Response = Callable[[BaseHTTPRequestHandler, int], None]  # (request, first requested byte)


def official(handler: BaseHTTPRequestHandler, first: int) -> None:
    """Send the whole file, or the requested range."""
    send(handler, 206 if first else 200, CONTENT[first:], first)


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, first: int = 0, promised: int = -1) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if promised < 0 else promised))
    if status == 206:
        handler.send_header("Content-Range", f"bytes {first}-{SIZE - 1}/{SIZE}")
    handler.end_headers()
    handler.wfile.write(body)


def cut(handler: BaseHTTPRequestHandler, first: int) -> None:
    """Send a third of the requested bytes, then close the connection."""
    rest = CONTENT[first:]
    send(handler, 206 if first else 200, rest[: len(rest) // 3], first, promised=len(rest))


def short(handler: BaseHTTPRequestHandler, first: int) -> None:
    """Send a complete response with a truncated file."""
    send(handler, 206 if first else 200, CONTENT[first:200_000], first)


def chunked_cut(handler: BaseHTTPRequestHandler, first: int) -> None:
    """Send a chunked response that stops in the middle of a chunk."""
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n" % SIZE + CONTENT[:100_000])


def without_ranges(handler: BaseHTTPRequestHandler, first: int) -> None:
    """Ignore the range and send the whole file."""
    send(handler, 200, CONTENT)


def wrong_range(handler: BaseHTTPRequestHandler, first: int) -> None:
    """Send status 206 with another range."""
    send(handler, 206, CONTENT[: SIZE - first], first)


def wrong_content(handler: BaseHTTPRequestHandler, first: int) -> None:
    send(handler, 206 if first else 200, bytes(SIZE - first), first)


def longer(handler: BaseHTTPRequestHandler, first: int) -> None:
    send(handler, 206 if first else 200, CONTENT[first:] + b"x" * 100_000, first)


def one_byte_longer(handler: BaseHTTPRequestHandler, first: int) -> None:
    send(handler, 206 if first else 200, CONTENT[first:] + b"x", first)


def empty(handler: BaseHTTPRequestHandler, first: int) -> None:
    send(handler, 200, b"")


def absent(handler: BaseHTTPRequestHandler, first: int) -> None:
    send(handler, 404, b"<html>not here</html>")


def broken(handler: BaseHTTPRequestHandler, first: int) -> None:
    send(handler, 503, b"")


def not_http(handler: BaseHTTPRequestHandler, first: int) -> None:
    """Send something that is not HTTP."""
    handler.wfile.write(b"SSH-2.0-hello\r\n\r\n")


@dataclass
class Server:
    """The next response of the server, and the requests it received."""

    address: str = ""
    response: Response = official
    requests: list[tuple[str, str | None]] = field(default_factory=list)  # (path, Range header)

    def file(self, name: str = "file.gz", **changes: Any) -> File:
        return replace(File(name, f"{self.address}/{name}", SIZE, f"sha256:{digest(CONTENT)}"), **changes)


class QuietServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing when a client closes the connection early."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    gc.disable()  # keeps all objects of the test in the youngest generation
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            range_header = self.headers.get("Range")
            state.requests.append((self.path, range_header))
            state.response(self, int(range_header.removeprefix("bytes=").removesuffix("-")) if range_header else 0)

        def log_message(self, *args: Any) -> None:
            """Print nothing: requests are recorded."""

    http = QuietServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            gc.collect(0)  # close leftovers of failed requests here, so that no later test warns about them
        gc.enable()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def summary(content: bytes) -> tuple[int, str]:
    """Size and checksum of the content, so that a failed assertion prints one line."""
    return len(content), digest(content)


OFFICIAL = summary(CONTENT)


def files_in(folder: Path) -> dict[str, tuple[int, str]]:
    return {path.name: summary(path.read_bytes()) for path in folder.iterdir()}


def test_good_file_is_kept_under_its_name(server: Server, tmp_path: Path) -> None:
    """A good download is the only file in a newly created folder."""
    path = download(server.file(), tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "file.gz"
    assert files_in(path.parent) == {"file.gz": OFFICIAL}
    assert server.requests == [("/file.gz", None)]


def test_progress_grows_to_the_full_size(server: Server, tmp_path: Path) -> None:
    """Progress reports the bytes so far and in total, grows, and ends at the full size."""
    progress: list[tuple[str, int, int]] = []
    download(server.file(), tmp_path, lambda *now: progress.append(now))
    done = [so_far for _, so_far, _ in progress]
    assert done == sorted(set(done))
    assert done[-1] == SIZE
    assert {(name, total) for name, _, total in progress} == {("file.gz", SIZE)}


def test_md5_is_supported(server: Server, tmp_path: Path) -> None:
    """A file with a published md5 is verified by it."""
    md5 = hashlib.md5(CONTENT).hexdigest()
    assert summary(download(server.file(checksum=f"md5:{md5}"), tmp_path).read_bytes()) == OFFICIAL


def test_wrong_checksum_keeps_nothing(server: Server, tmp_path: Path) -> None:
    """A file with the right size and other content is refused with its address and deleted."""
    server.response = wrong_content
    text = refusal(download, server.file(), tmp_path)
    assert server.file().url in text
    assert "wrong checksum" in text
    assert "it was deleted" in text
    assert files_in(tmp_path) == {}
    server.response = official
    assert summary(download(server.file(), tmp_path).read_bytes()) == OFFICIAL


def test_file_without_a_published_checksum_is_not_kept(server: Server, tmp_path: Path) -> None:
    """A file without a published checksum cannot be verified and is not kept."""
    assert "wrong checksum" in refusal(download, server.file(checksum=""), tmp_path)
    assert files_in(tmp_path) == {}


@pytest.mark.parametrize(
    ("response", "kept"), [(cut, SIZE // 3), (short, 200_000)], ids=["connection cut", "file too short"]
)
def test_a_truncated_download_resumes(server: Server, tmp_path: Path, response: Response, kept: int) -> None:
    """A truncated download keeps its part, reports its size, and resumes from there."""
    server.response = response
    text = refusal(download, server.file(), tmp_path)
    assert f"cut off after {kept} of {SIZE} bytes" in text
    assert "run the same command again" in text
    assert files_in(tmp_path) == {"file.gz.part": summary(CONTENT[:kept])}
    server.response = official
    progress: list[int] = []
    path = download(server.file(), tmp_path, lambda name, done, total: progress.append(done))
    assert files_in(tmp_path) == {"file.gz": OFFICIAL}
    assert path.name == "file.gz"
    assert server.requests == [("/file.gz", None), ("/file.gz", f"bytes={kept}-")]
    assert progress[0] > kept


def test_a_download_may_be_truncated_repeatedly(server: Server, tmp_path: Path) -> None:
    """Each truncated attempt extends the part, and the last one completes it."""
    server.response = cut
    sizes = []
    for _ in range(4):
        assert "cut off" in refusal(download, server.file(), tmp_path)
        sizes.append(files_in(tmp_path)["file.gz.part"][0])
    assert sizes == sorted(set(sizes))
    server.response = official
    assert summary(download(server.file(), tmp_path).read_bytes()) == OFFICIAL
    assert [header for _, header in server.requests[1:]] == [f"bytes={size}-" for size in sizes]


def test_chunked_download_that_is_cut_is_refused_and_resumed(server: Server, tmp_path: Path) -> None:
    """A truncated chunked response is refused, and the next attempt succeeds."""
    server.response = chunked_cut
    assert server.file().url in refusal(download, server.file(), tmp_path)
    assert set(files_in(tmp_path)) <= {"file.gz.part"}
    server.response = official
    assert summary(download(server.file(), tmp_path).read_bytes()) == OFFICIAL


def test_server_without_ranges_restarts_cleanly(server: Server, tmp_path: Path) -> None:
    """When the server ignores the range, the old part is overwritten, not extended."""
    (tmp_path / "file.gz.part").write_bytes(CONTENT[:1000])
    server.response = without_ranges
    progress: list[int] = []
    download(server.file(), tmp_path, lambda name, done, total: progress.append(done))
    assert files_in(tmp_path) == {"file.gz": OFFICIAL}
    assert server.requests == [("/file.gz", "bytes=1000-")]
    assert progress[-1] == SIZE


def test_wrong_range_is_caught_by_the_checksum(server: Server, tmp_path: Path) -> None:
    """A wrong range gives a wrong checksum, and the file is not kept."""
    (tmp_path / "file.gz.part").write_bytes(CONTENT[:1000])
    server.response = wrong_range
    assert "wrong checksum" in refusal(download, server.file(), tmp_path)
    assert files_in(tmp_path) == {}


def test_part_of_another_file_is_caught_by_the_checksum(server: Server, tmp_path: Path) -> None:
    """A part of another file spoils one attempt only."""
    (tmp_path / "file.gz.part").write_bytes(b"something else")
    assert "wrong checksum" in refusal(download, server.file(), tmp_path)
    assert files_in(tmp_path) == {}
    assert summary(download(server.file(), tmp_path).read_bytes()) == OFFICIAL


@pytest.mark.parametrize("extra", [0, 1, 5000])
def test_part_as_long_as_the_file_is_fetched_afresh(server: Server, tmp_path: Path, extra: int) -> None:
    """A part at least as long as the official file is discarded instead of requesting a range beyond the end."""
    (tmp_path / "file.gz.part").write_bytes(bytes(SIZE + extra))
    assert summary(download(server.file(), tmp_path).read_bytes()) == OFFICIAL
    assert server.requests == [("/file.gz", None)]
    assert files_in(tmp_path) == {"file.gz": OFFICIAL}


@pytest.mark.parametrize("response", [longer, one_byte_longer])
def test_longer_file_is_refused(server: Server, tmp_path: Path, response: Response) -> None:
    """A file longer than the official one is refused with the official size and not kept."""
    server.response = response
    text = refusal(download, server.file(), tmp_path)
    assert f"longer than the official {SIZE} bytes" in text
    assert not (tmp_path / "file.gz").exists()
    assert sum(size for size, _ in files_in(tmp_path).values()) <= SIZE
    server.response = official
    assert summary(download(server.file(), tmp_path).read_bytes()) == OFFICIAL


@pytest.mark.parametrize(
    ("response", "reason"), [(absent, "Not Found"), (broken, "Service Unavailable"), (not_http, ""), (empty, "cut off")]
)
def test_a_refused_request_names_the_destination(
    server: Server, tmp_path: Path, response: Response, reason: str
) -> None:
    """When the server refuses, the message has its reason and the path where the file belongs."""
    server.response = response
    text = refusal(download, server.file(), tmp_path)
    assert text.startswith(f"cannot download {server.file().url} (")
    assert reason in text
    assert text.endswith(f"put it at {tmp_path / 'file.gz'}")
    assert not (tmp_path / "file.gz").exists()


def test_a_refused_connection_names_the_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D13: without a network the message names the file to download and its path."""
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    file = File("file.gz", f"http://127.0.0.1:{port}/file.gz", SIZE, f"sha256:{digest(CONTENT)}")
    text = refusal(download, file, tmp_path / "mnist")
    assert file.url in text
    assert "Connection refused" in text
    assert text.endswith(f"put it at {tmp_path / 'mnist' / 'file.gz'}")
    assert files_in(tmp_path / "mnist") == {}


def test_a_failed_download_closes_its_connection(server: Server, tmp_path: Path) -> None:
    """A refused download closes its connection at once, not at garbage collection."""
    hung_up = threading.Event()

    def absent_then_listen(handler: BaseHTTPRequestHandler, first: int) -> None:
        send(handler, 404, b"not here", promised=1000)
        handler.connection.settimeout(1)
        try:
            ended = handler.connection.recv(1) == b""
        except ConnectionResetError:  # closed before the body was read
            ended = True
        if ended:
            hung_up.set()

    server.response = absent_then_listen
    with pytest.raises(WaffleError) as caught:
        download(server.file(), tmp_path)
    assert "Not Found" in str(caught.value)
    assert hung_up.wait(2)


def test_refused_request_keeps_the_part(server: Server, tmp_path: Path) -> None:
    """A failed request keeps the part fetched before."""
    (tmp_path / "file.gz.part").write_bytes(CONTENT[:1000])
    server.response = broken
    refusal(download, server.file(), tmp_path)
    assert files_in(tmp_path) == {"file.gz.part": summary(CONTENT[:1000])}


def test_an_interrupted_download_resumes(server: Server, tmp_path: Path) -> None:
    """Ctrl-C leaves a part from which the next attempt resumes."""

    def interrupt(name: str, done: int, total: int) -> None:
        if done > SIZE // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(server.file(), tmp_path, interrupt)
    kept, content = files_in(tmp_path)["file.gz.part"]
    assert kept > SIZE // 2
    assert content == digest(CONTENT[:kept])
    assert summary(download(server.file(), tmp_path).read_bytes()) == OFFICIAL
    assert server.requests[-1] == ("/file.gz", f"bytes={kept}-")


def test_folder_that_cannot_be_made_is_refused(server: Server, tmp_path: Path) -> None:
    """D13: a file in place of the folder is refused in one line with the path."""
    (tmp_path / "taken").write_text("x")
    text = refusal(download, server.file(), tmp_path / "taken")
    assert str(tmp_path / "taken" / "file.gz") in text
    assert server.requests == []


def sources(server: Server, monkeypatch: pytest.MonkeyPatch) -> tuple[File, ...]:
    """Make the server the source of MNIST; every file has the same content."""
    files = tuple(server.file(file.name) for file in SOURCES["mnist"].files)
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], files=files))
    return files


def test_fetch_downloads_every_file_once(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fetch downloads every file of a set in order, and a second fetch requests nothing."""
    files = sources(server, monkeypatch)
    progress: list[str] = []
    new = data.fetch("mnist", str(tmp_path), lambda name, done, total: progress.append(name))
    assert new == [tmp_path / "mnist" / file.name for file in files]
    assert files_in(tmp_path / "mnist") == {file.name: OFFICIAL for file in files}
    assert list(dict.fromkeys(progress)) == [file.name for file in files]
    server.requests.clear()
    assert data.fetch("mnist", str(tmp_path)) == []
    assert server.requests == []


def test_fetch_downloads_only_missing_files(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fetch keeps existing files and requests only the others."""
    files = sources(server, monkeypatch)
    (tmp_path / "mnist").mkdir()
    for i in (0, 2):
        (tmp_path / "mnist" / files[i].name).write_bytes(b"mine")
    new = data.fetch("mnist", str(tmp_path))
    assert new == [tmp_path / "mnist" / files[i].name for i in (1, 3)]
    assert [path for path, _ in server.requests] == [f"/{files[i].name}" for i in (1, 3)]
    assert (tmp_path / "mnist" / files[0].name).read_bytes() == b"mine"


def test_fetch_resumes_after_a_failure(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that failed at the second file does not download the first one again."""
    files = sources(server, monkeypatch)

    def second_fails(handler: BaseHTTPRequestHandler, first: int) -> None:
        (absent if files[1].name in handler.path else official)(handler, first)

    server.response = second_fails
    assert str(tmp_path / "mnist" / files[1].name) in refusal(data.fetch, "mnist", str(tmp_path))
    server.response = official
    server.requests.clear()
    assert len(data.fetch("mnist", str(tmp_path))) == 3
    assert f"/{files[0].name}" not in [path for path, _ in server.requests]


def test_fetch_uses_the_data_folder_of_the_variable(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder, fetch writes to $WAFFLE_DATA."""
    sources(server, monkeypatch)
    monkeypatch.setenv("WAFFLE_DATA", str(tmp_path / "variable"))
    assert {path.parent for path in data.fetch("mnist")} == {tmp_path / "variable" / "mnist"}


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_built_in_sets_need_no_fetching(tmp_path: Path, name: str) -> None:
    """The built-in sets need no download."""
    assert data.fetch(name, str(tmp_path)) == []
    assert files_in(tmp_path) == {}


def test_unpacked_cifar_needs_no_fetching(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive is downloaded only when the unpacked batches are missing."""
    source = SOURCES["cifar10"]
    file = server.file(source.files[0].name)
    monkeypatch.setitem(SOURCES, "cifar10", replace(source, files=(file,)))
    runtime = tmp_path / "a" / "cifar-10-batches-bin"
    runtime.mkdir(parents=True)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (runtime / name).write_bytes(b"x")
    assert data.fetch("cifar10", str(tmp_path / "a")) == []
    assert server.requests == []
    assert data.fetch("cifar10", str(tmp_path / "b")) == [tmp_path / "b" / "cifar10" / file.name]


def test_incomplete_cifar_is_fetched(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive is downloaded when a batch and the archive are missing."""
    source = SOURCES["cifar10"]
    file = server.file(source.files[0].name)
    monkeypatch.setitem(SOURCES, "cifar10", replace(source, files=(file,)))
    (tmp_path / "cifar10" / "cifar-10-batches-bin").mkdir(parents=True)
    assert "`waffle data cifar10`" in refusal(data.load, "cifar10", str(tmp_path))
    assert data.fetch("cifar10", str(tmp_path)) == [tmp_path / "cifar10" / file.name]


def test_published_sources_are_complete() -> None:
    """Every published file has an address, a size and a checksum of the right length."""
    lengths = {"sha256": 64, "md5": 32}
    for source in SOURCES.values():
        for file in source.files:
            algorithm, _, published = file.checksum.partition(":")
            assert file.url.startswith("http")
            assert file.url.endswith(file.name)
            assert file.size > 1000
            assert len(published) == lengths[algorithm]
            assert int(published, 16) >= 0
