"""nginx in front of servers, with the block of docs/fleet.md."""

import os
import re
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
DOC = Path(__file__).parents[1] / "docs" / "fleet.md"
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
{block}
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
    user = "user nobody nogroup;" if os.geteuid() == 0 else ""
    block = documented_block(port, ports)
    text = CONFIGURATION.format(folder=folder, user=user, block=block)
    (folder / "nginx.conf").write_text(text)
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    return [program, "-c", str(folder / "nginx.conf"), "-p", str(folder)]


def documented_block(port: int, ports: Sequence[int]) -> str:
    """The block of the page, at a port of this machine and in front of these."""
    found = re.findall(r"```nginx\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert len(found) == 1
    [block] = found
    one, other = re.findall(r"  server [\d.]+:8091 .*;\n", block)
    assert block.count("listen 80;") == 1
    address = re.compile(r"[\d.]+:8091")
    named = (address.sub(f"127.0.0.1:{each}", one) for each in ports)
    block = block.replace(one + other, "".join(named))
    return block.replace("listen 80;", f"listen 127.0.0.1:{port};")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
