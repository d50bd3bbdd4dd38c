"""A web server that answers what a test wants."""

import json
import subprocess
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Web(ThreadingHTTPServer):
    """Answers what the test put under method and path."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.answers: dict[tuple[str, str], tuple[int, dict[str, str], Any]] = {}
        self.sent: list[tuple[str, str, bytes]] = []
        self.heads: list[Any] = []


class Answers(BaseHTTPRequestHandler):
    def answer(self):
        assert isinstance(self.server, Web)
        length = int(self.headers.get("content-length") or 0)
        self.server.sent.append((self.command, self.path, self.rfile.read(length)))
        self.server.heads.append(self.headers)
        status, headers, body = self.server.answers.get(
            (self.command, self.path.partition("?")[0]),
            (404, {}, {"error": {"message": "Not Found"}}),
        )
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_DELETE = do_PATCH = answer

    def log_message(self, format, *args):
        pass


@contextmanager
def serving():
    """One that serves."""
    with Web() as web:
        thread = threading.Thread(target=web.serve_forever, args=(0.01,))
        thread.start()
        yield web
        web.shutdown()
        thread.join()


def signed_itself(directory, *options):
    """A certificate that trusts nobody but itself, with its key in the same file."""
    path = directory / "server.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-nodes", "-subj", "/CN=a"]
    make += ["-pkeyopt", "ec_paramgen_curve:P-256", "-keyout", path, *options]
    made = subprocess.run(make, check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + made.stdout)
    return path
