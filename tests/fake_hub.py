"""A hub to fetch from, and its cache as the host leaves it behind."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

from huggingface_hub import constants

MODEL = "someone/model"
MAIN, OTHER = "a" * 40, "b" * 40


def content(name, commit):
    return f"{name} of {commit}".encode()


def path_of(name, commit):
    return f"/{MODEL}/resolve/{commit}/{name}"


class Hub:
    """Serves files by their paths; ``asked`` holds (method, path), in their order."""

    def __init__(self, files):
        self.asked = []
        self.files = dict(files)
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                if "/resolve/" in self.path:  # it asks for other things as well
                    hub.asked.append((self.command, self.path))
                body = hub.files.get(self.path)
                self.send_response(404 if body is None else 200)
                if body is None:
                    self.send_header("X-Error-Code", "EntryNotFound")
                commit = self.path.partition("/resolve/")[2].partition("/")[0]
                self.send_header("X-Repo-Commit", commit)
                self.send_header("ETag", f'"{hashlib.sha1(body or b"").hexdigest()}"')
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body or b"")

            do_HEAD = do_GET = answer

            def log_message(self, format, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=[0.01])
        self.thread.start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


def use_hub(monkeypatch, url):
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def download(cache: Path, commit, *files, branch=None) -> Path:
    """Leave files of a revision in a cache, as a download does."""
    repository = cache / "models--someone--model"
    folder = repository / "snapshots" / commit
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content(name, commit))
    (repository / "trees").mkdir(parents=True, exist_ok=True)
    if branch is not None:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    return folder


def vllm_config(model=MODEL, revision=None, download_dir=None, **more):
    """What we read of the host's; ``more`` has the dtype and the device."""
    named = {"model": model, "revision": revision, "hf_token": None}
    return SimpleNamespace(
        model_config=SimpleNamespace(**named, dtype=more.get("dtype")),
        load_config=SimpleNamespace(download_dir=download_dir),
        device_config=SimpleNamespace(device=more.get("device")),
    )
