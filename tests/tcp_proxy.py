"""A line between a client and a server that a test can cut, at once or in the middle of what is being said."""

import contextlib
import socket
import threading
from types import TracebackType

__all__ = ["TcpProxy"]

_CHUNK_BYTES = 4_096


class TcpProxy:
    """Listens on a free port of loopback and passes everything on to another."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._bytes_until_cut: int | None = None
        self.num_cuts = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def __enter__(self) -> "TcpProxy":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Some platforms leave a thread in accept when the socket is only closed.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self._thread.join()

    def cut(self) -> None:
        """Cut all lines now; new ones may be made at once."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
            self.num_cuts += 1
        for line in sockets:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()

    def cut_after(self, num_bytes: int) -> None:
        """Cut all lines once so many more bytes have gone to the server, wherever in a command that is."""
        with self._lock:
            self._bytes_until_cut = num_bytes

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._target_port))
            except OSError:
                client.close()
                continue
            with self._lock:
                self._sockets |= {client, server}
            for source, sink, counts in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass_on, args=(source, sink, counts), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK_BYTES):
                allowed = self._allowed(len(chunk)) if counts else len(chunk)
                sink.sendall(chunk[:allowed])
                if allowed < len(chunk):
                    self.cut()
                    return
        for line in (source, sink):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        with self._lock:
            self._sockets -= {source, sink}

    def _allowed(self, num_bytes: int) -> int:
        with self._lock:
            if self._bytes_until_cut is None:
                return num_bytes
            allowed = min(num_bytes, self._bytes_until_cut)
            self._bytes_until_cut -= allowed
            if allowed < num_bytes:
                self._bytes_until_cut = None
            return allowed
