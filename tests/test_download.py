"""Downloads from a real server on this machine, which cuts, lies and refuses."""

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
Answer = Callable[[BaseHTTPRequestHandler, int], None]  # (request, first byte it asks for)


def official(handler: BaseHTTPRequestHandler, first: int) -> None:
    """The whole file, or the rest of it where the request asks for a range."""
    send(handler, 206 if first else 200, CONTENT[first:], first)


def send(handler: BaseHTTPRequestHandler, status: int, body: bytes, first: int = 0, promised: int = -1) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if promised < 0 else promised))
    if status == 206:
        handler.send_header("Content-Range", f"bytes {first}-{SIZE - 1}/{SIZE}")
    handler.end_headers()
    handler.wfile.write(body)


def cut(handler: BaseHTTPRequestHandler, first: int) -> None:
    """A third of what was asked for, then the connection closes."""
    rest = CONTENT[first:]
    send(handler, 206 if first else 200, rest[: len(rest) // 3], first, promised=len(rest))


def short(handler: BaseHTTPRequestHandler, first: int) -> None:
    """An honest answer with a file that ends too early."""
    send(handler, 206 if first else 200, CONTENT[first:200_000], first)


def chunked_cut(handler: BaseHTTPRequestHandler, first: int) -> None:
    """A chunked answer that stops in the middle of a chunk."""
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.send_header("Connection", "close")
    handler.end_headers()
    handler.wfile.write(b"%x\r\n" % SIZE + CONTENT[:100_000])


def without_ranges(handler: BaseHTTPRequestHandler, first: int) -> None:
    """A server that ignores ranges sends the whole file."""
    send(handler, 200, CONTENT)


def wrong_range(handler: BaseHTTPRequestHandler, first: int) -> None:
    """A server that says 206 and sends another part."""
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


def nonsense(handler: BaseHTTPRequestHandler, first: int) -> None:
    """Not even HTTP."""
    handler.wfile.write(b"SSH-2.0-hello\r\n\r\n")


@dataclass
class Server:
    """What it answers next, and what it was asked."""

    address: str = ""
    answer: Answer = official
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # (path, Range header)

    def file(self, name: str = "file.gz", **changes: Any) -> File:
        return replace(File(name, f"{self.address}/{name}", SIZE, f"sha256:{digest(CONTENT)}"), **changes)


class Quiet(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is part of the tests."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "*")
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.asked.append((self.path, asked))
            state.answer(self, int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0)

        def log_message(self, *args: Any) -> None:
            """Requests are recorded, not printed."""

    http = Quiet(("127.0.0.1", 0), Handler)
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
            gc.collect()  # what a failed request left open is not told of in another test


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def mark(content: bytes) -> tuple[int, str]:
    """Size and checksum stand for the content, so that a failure prints in a line."""
    return len(content), digest(content)


WHOLE = mark(CONTENT)


def held(folder: Path) -> dict[str, tuple[int, str]]:
    return {path.name: mark(path.read_bytes()) for path in folder.iterdir()}


def test_good_file_is_kept_under_its_name(server: Server, tmp_path: Path) -> None:
    """A good download ends as the official file, alone in a folder that is made for it."""
    path = download(server.file(), tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "file.gz"
    assert held(path.parent) == {"file.gz": WHOLE}
    assert server.asked == [("/file.gz", None)]


def test_progress_grows_to_the_full_size(server: Server, tmp_path: Path) -> None:
    """Progress is told as bytes so far of bytes in all, growing, and ends at the full size."""
    told: list[tuple[str, int, int]] = []
    download(server.file(), tmp_path, lambda *now: told.append(now))
    done = [so_far for _, so_far, _ in told]
    assert done == sorted(set(done))
    assert done[-1] == SIZE
    assert {(name, total) for name, _, total in told} == {("file.gz", SIZE)}


def test_md5_is_a_checksum_too(server: Server, tmp_path: Path) -> None:
    """A file whose published checksum is an md5 is verified by it."""
    md5 = hashlib.md5(CONTENT).hexdigest()
    assert mark(download(server.file(checksum=f"md5:{md5}"), tmp_path).read_bytes()) == WHOLE


def test_wrong_checksum_keeps_nothing(server: Server, tmp_path: Path) -> None:
    """A file of the right size and another content is refused with its address, and nothing of it is kept."""
    server.answer = wrong_content
    text = refusal(download, server.file(), tmp_path)
    assert server.file().url in text
    assert "wrong checksum" in text
    assert "it was deleted" in text
    assert held(tmp_path) == {}
    server.answer = official
    assert mark(download(server.file(), tmp_path).read_bytes()) == WHOLE


def test_file_without_a_published_checksum_is_not_kept(server: Server, tmp_path: Path) -> None:
    """A file without a published checksum can never be verified, so it is not kept."""
    assert "wrong checksum" in refusal(download, server.file(checksum=""), tmp_path)
    assert held(tmp_path) == {}


@pytest.mark.parametrize(
    ("answer", "kept"), [(cut, SIZE // 3), (short, 200_000)], ids=["connection cut", "file too short"]
)
def test_cut_download_goes_on_where_it_stopped(server: Server, tmp_path: Path, answer: Answer, kept: int) -> None:
    """A download that stops early keeps its part, says how far it came, and goes on from there the next time."""
    server.answer = answer
    text = refusal(download, server.file(), tmp_path)
    assert f"cut off after {kept} of {SIZE} bytes" in text
    assert "run the same command again" in text
    assert held(tmp_path) == {"file.gz.part": mark(CONTENT[:kept])}
    server.answer = official
    told: list[int] = []
    path = download(server.file(), tmp_path, lambda name, done, total: told.append(done))
    assert held(tmp_path) == {"file.gz": WHOLE}
    assert path.name == "file.gz"
    assert server.asked == [("/file.gz", None), ("/file.gz", f"bytes={kept}-")]
    assert told[0] > kept


def test_download_may_be_cut_again_and_again(server: Server, tmp_path: Path) -> None:
    """Each of several cut tries adds to the part, and the last one completes it."""
    server.answer = cut
    sizes = []
    for _ in range(4):
        assert "cut off" in refusal(download, server.file(), tmp_path)
        sizes.append(held(tmp_path)["file.gz.part"][0])
    assert sizes == sorted(set(sizes))
    server.answer = official
    assert mark(download(server.file(), tmp_path).read_bytes()) == WHOLE
    assert [asked for _, asked in server.asked[1:]] == [f"bytes={size}-" for size in sizes]


def test_chunked_download_that_is_cut_is_refused_and_resumed(server: Server, tmp_path: Path) -> None:
    """A chunked answer that breaks off is refused, and what came of it does not spoil the next try."""
    server.answer = chunked_cut
    assert server.file().url in refusal(download, server.file(), tmp_path)
    assert set(held(tmp_path)) <= {"file.gz.part"}
    server.answer = official
    assert mark(download(server.file(), tmp_path).read_bytes()) == WHOLE


def test_server_without_ranges_restarts_cleanly(server: Server, tmp_path: Path) -> None:
    """Where the server ignores the range and sends everything, the old part is overwritten, not added to."""
    (tmp_path / "file.gz.part").write_bytes(CONTENT[:1000])
    server.answer = without_ranges
    told: list[int] = []
    download(server.file(), tmp_path, lambda name, done, total: told.append(done))
    assert held(tmp_path) == {"file.gz": WHOLE}
    assert server.asked == [("/file.gz", "bytes=1000-")]
    assert told[-1] == SIZE


def test_wrong_range_is_caught_by_the_checksum(server: Server, tmp_path: Path) -> None:
    """A server that sends another part than asked for gives a file with a wrong checksum, which is not kept."""
    (tmp_path / "file.gz.part").write_bytes(CONTENT[:1000])
    server.answer = wrong_range
    assert "wrong checksum" in refusal(download, server.file(), tmp_path)
    assert held(tmp_path) == {}


def test_part_of_another_file_is_caught_by_the_checksum(server: Server, tmp_path: Path) -> None:
    """A part that does not belong to the file spoils one try only."""
    (tmp_path / "file.gz.part").write_bytes(b"something else")
    assert "wrong checksum" in refusal(download, server.file(), tmp_path)
    assert held(tmp_path) == {}
    assert mark(download(server.file(), tmp_path).read_bytes()) == WHOLE


@pytest.mark.parametrize("extra", [0, 1, 5000])
def test_part_as_long_as_the_file_is_fetched_afresh(server: Server, tmp_path: Path, extra: int) -> None:
    """A part that is already as long as the official file, or longer, never asks for a range beyond its end."""
    (tmp_path / "file.gz.part").write_bytes(bytes(SIZE + extra))
    assert mark(download(server.file(), tmp_path).read_bytes()) == WHOLE
    assert server.asked == [("/file.gz", None)]
    assert held(tmp_path) == {"file.gz": WHOLE}


@pytest.mark.parametrize("answer", [longer, one_byte_longer])
def test_longer_file_is_refused(server: Server, tmp_path: Path, answer: Answer) -> None:
    """A file longer than the official one is refused with the official size, and never takes its place."""
    server.answer = answer
    text = refusal(download, server.file(), tmp_path)
    assert f"longer than the official {SIZE} bytes" in text
    assert not (tmp_path / "file.gz").exists()
    assert sum(size for size, _ in held(tmp_path).values()) <= SIZE
    server.answer = official
    assert mark(download(server.file(), tmp_path).read_bytes()) == WHOLE


@pytest.mark.parametrize(
    ("answer", "reason"), [(absent, "Not Found"), (broken, "Service Unavailable"), (nonsense, ""), (empty, "cut off")]
)
def test_refused_request_says_where_to_put_the_file(
    server: Server, tmp_path: Path, answer: Answer, reason: str
) -> None:
    """A server that does not give the file is named with its reason, and with the place the file belongs to."""
    server.answer = answer
    text = refusal(download, server.file(), tmp_path)
    assert text.startswith(f"cannot download {server.file().url} (")
    assert reason in text
    assert text.endswith(f"put it at {tmp_path / 'file.gz'}")
    assert not (tmp_path / "file.gz").exists()


def test_refused_connection_says_where_to_put_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D13: an offline machine is told which file to fetch elsewhere and exactly where to put it."""
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    file = File("file.gz", f"http://127.0.0.1:{port}/file.gz", SIZE, f"sha256:{digest(CONTENT)}")
    text = refusal(download, file, tmp_path / "mnist")
    assert file.url in text
    assert "Connection refused" in text
    assert text.endswith(f"put it at {tmp_path / 'mnist' / 'file.gz'}")
    assert held(tmp_path / "mnist") == {}


def test_failed_download_hangs_up(server: Server, tmp_path: Path) -> None:
    """A download that the server refuses closes its connection at once, not when its rubbish is collected."""
    hung_up = threading.Event()

    def absent_then_listen(handler: BaseHTTPRequestHandler, first: int) -> None:
        send(handler, 404, b"not here", promised=1000)
        handler.connection.settimeout(1)
        try:
            ended = handler.connection.recv(1) == b""
        except ConnectionResetError:  # hung up with the answer's body still unread
            ended = True
        if ended:
            hung_up.set()

    server.answer = absent_then_listen
    with pytest.raises(WaffleError) as caught:
        download(server.file(), tmp_path)
    assert "Not Found" in str(caught.value)
    assert hung_up.wait(2)


def test_refused_request_keeps_the_part(server: Server, tmp_path: Path) -> None:
    """A server that is down for a while costs nothing of what was fetched before."""
    (tmp_path / "file.gz.part").write_bytes(CONTENT[:1000])
    server.answer = broken
    refusal(download, server.file(), tmp_path)
    assert held(tmp_path) == {"file.gz.part": mark(CONTENT[:1000])}


def test_interrupted_download_goes_on(server: Server, tmp_path: Path) -> None:
    """Ctrl-C in the middle leaves a part that the next try goes on from."""

    def interrupt(name: str, done: int, total: int) -> None:
        if done > SIZE // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        download(server.file(), tmp_path, interrupt)
    kept, content = held(tmp_path)["file.gz.part"]
    assert kept > SIZE // 2
    assert content == digest(CONTENT[:kept])
    assert mark(download(server.file(), tmp_path).read_bytes()) == WHOLE
    assert server.asked[-1] == ("/file.gz", f"bytes={kept}-")


def test_folder_that_cannot_be_made_is_refused(server: Server, tmp_path: Path) -> None:
    """D13: a file in the way of the folder ends in one line that names the place."""
    (tmp_path / "taken").write_text("x")
    text = refusal(download, server.file(), tmp_path / "taken")
    assert str(tmp_path / "taken" / "file.gz") in text
    assert server.asked == []


def sources(server: Server, monkeypatch: pytest.MonkeyPatch) -> tuple[File, ...]:
    """Make the server the source of MNIST; every file has the same content under its own name."""
    files = tuple(server.file(file.name) for file in SOURCES["mnist"].files)
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], files=files))
    return files


def test_fetch_brings_all_files_and_then_none(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch brings every file of a set into its folder, in order, and a second fetch asks for nothing."""
    files = sources(server, monkeypatch)
    told: list[str] = []
    new = data.fetch("mnist", str(tmp_path), lambda name, done, total: told.append(name))
    assert new == [tmp_path / "mnist" / file.name for file in files]
    assert held(tmp_path / "mnist") == {file.name: WHOLE for file in files}
    assert list(dict.fromkeys(told)) == [file.name for file in files]
    server.asked.clear()
    assert data.fetch("mnist", str(tmp_path)) == []
    assert server.asked == []


def test_fetch_brings_only_what_is_missing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetch leaves the files that are there alone and asks the server for the others only."""
    files = sources(server, monkeypatch)
    (tmp_path / "mnist").mkdir()
    for i in (0, 2):
        (tmp_path / "mnist" / files[i].name).write_bytes(b"mine")
    new = data.fetch("mnist", str(tmp_path))
    assert new == [tmp_path / "mnist" / files[i].name for i in (1, 3)]
    assert [path for path, _ in server.asked] == [f"/{files[i].name}" for i in (1, 3)]
    assert (tmp_path / "mnist" / files[0].name).read_bytes() == b"mine"


def test_fetch_goes_on_after_a_failure(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that failed at the second file does not fetch the first one again."""
    files = sources(server, monkeypatch)

    def second_fails(handler: BaseHTTPRequestHandler, first: int) -> None:
        (absent if files[1].name in handler.path else official)(handler, first)

    server.answer = second_fails
    assert str(tmp_path / "mnist" / files[1].name) in refusal(data.fetch, "mnist", str(tmp_path))
    server.answer = official
    server.asked.clear()
    assert len(data.fetch("mnist", str(tmp_path))) == 3
    assert f"/{files[0].name}" not in [path for path, _ in server.asked]


def test_fetch_uses_the_data_folder_of_the_variable(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder given, fetch writes below $WAFFLE_DATA."""
    sources(server, monkeypatch)
    monkeypatch.setenv("WAFFLE_DATA", str(tmp_path / "variable"))
    assert {path.parent for path in data.fetch("mnist")} == {tmp_path / "variable" / "mnist"}


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_built_in_sets_need_no_fetching(tmp_path: Path, name: str) -> None:
    """The built-in sets are fetched from nowhere."""
    assert data.fetch(name, str(tmp_path)) == []
    assert held(tmp_path) == {}


def test_unpacked_cifar_needs_no_fetching(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all unpacked batches lie there, the archive is not fetched; where nothing lies there, it is."""
    source = SOURCES["cifar10"]
    file = server.file(source.files[0].name)
    monkeypatch.setitem(SOURCES, "cifar10", replace(source, files=(file,)))
    runtime = tmp_path / "a" / "cifar-10-batches-bin"
    runtime.mkdir(parents=True)
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        (runtime / name).write_bytes(b"x")
    assert data.fetch("cifar10", str(tmp_path / "a")) == []
    assert server.asked == []
    assert data.fetch("cifar10", str(tmp_path / "b")) == [tmp_path / "b" / "cifar10" / file.name]


def test_incomplete_cifar_is_fetched(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an unpacked batch is missing and no archive lies there, the archive is fetched."""
    source = SOURCES["cifar10"]
    file = server.file(source.files[0].name)
    monkeypatch.setitem(SOURCES, "cifar10", replace(source, files=(file,)))
    (tmp_path / "cifar10" / "cifar-10-batches-bin").mkdir(parents=True)
    assert "`waffle data cifar10`" in refusal(data.load, "cifar10", str(tmp_path))
    assert data.fetch("cifar10", str(tmp_path)) == [tmp_path / "cifar10" / file.name]


def test_published_sources_are_whole() -> None:
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
