"""A TCP proxy on loopback that can be told to fail in the ways in which networks do."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Literal

Mode = Literal["pass", "refuse", "swallow", "cut"]


class Proxy:
    """Stands before a server of this machine.

    Modes: ``pass`` all on; ``refuse`` connections, as when nobody listens; ``swallow`` what comes and never answer;
    ``cut`` each connection after ``cut_after`` bytes of the server's answer, the request having arrived whole.

    Args:
        port: The server's.
        mode: To begin with.
    """

    def __init__(self, port: int, mode: Mode = "pass") -> None:
        self._target = port
        self._mode: Mode = mode
        self.cut_after = 20
        self.delay_s = 0.0
        self.num_cut = 0
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.set(mode)

    def set(self, mode: Mode) -> None:
        """From now on fail so; connections that are open are cut, but for those that are only swallowed from now on."""
        self._mode = mode
        if mode == "refuse" and self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        if mode != "refuse" and self._listener is None:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        if mode != "swallow":
            self._drop_all()

    def close(self) -> None:
        """End it."""
        self.set("refuse")

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(("127.0.0.1", self._target)) as server:
            self._open |= {client, server}
            back = threading.Thread(target=self._answer, args=(server, client), daemon=True)
            back.start()
            for data in _received(client):
                if self._mode != "swallow":
                    server.sendall(data)
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            back.join(10)
            self._open -= {client, server}

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        for data in _received(server):
            time.sleep(self.delay_s)
            if self._mode == "swallow":
                continue
            with contextlib.suppress(OSError):
                if self._mode == "cut":
                    self.num_cut += 1
                    client.sendall(data[: self.cut_after])
                    client.shutdown(socket.SHUT_RDWR)
                    return
                client.sendall(data)

    def _drop_all(self) -> None:
        for end in list(self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._open.clear()


def _received(end: socket.socket) -> Iterator[bytes]:
    while True:
        try:
            data = end.recv(65536)
        except OSError:
            return
        if not data:
            return
        yield data
