"""nginx in front of several servers, as docs/fleet.md has it."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_tts_cache.testing.server import free_port

START_SECONDS = 30
# In turns; a server that does not answer is left out for a second, and another one is
# asked: for uploads as well, of which none has begun where no connection was made.
CONFIGURATION = """
daemon off;
{user}
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream speech {{
{servers}
    keepalive 16;
  }}
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 64m;
    location / {{
      proxy_pass http://speech;
      proxy_http_version 1.1;
      proxy_set_header Host $host;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 600s;
      proxy_next_upstream error timeout non_idempotent;
      proxy_next_upstream_tries 2;
    }}
  }}
}}
"""


@contextmanager
def in_front_of(ports: Sequence[int]) -> Iterator[str]:
    """Yield the URL at which nginx passes requests on, in turns."""
    with tempfile.TemporaryDirectory(prefix="nginx-") as name:
        folder, port = Path(name), free_port()
        if os.geteuid() == 0:  # its worker is another user then
            shutil.chown(folder, "nobody", "nogroup")
        process = subprocess.Popen(_command(folder, port, ports))
        try:
            until = time.monotonic() + START_SECONDS
            while not _listens(port):
                assert process.poll() is None, (folder / "error.log").read_text()
                assert time.monotonic() < until
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(START_SECONDS)


def _command(folder: Path, port: int, ports: Sequence[int]) -> list[str]:
    lines = [f"    server 127.0.0.1:{p} max_fails=1 fail_timeout=1s;" for p in ports]
    user = "user nobody nogroup;" if os.geteuid() == 0 else ""
    text = CONFIGURATION.format(
        folder=folder, port=port, servers="\n".join(lines), user=user
    )
    (folder / "nginx.conf").write_text(text)
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    return [program, "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
