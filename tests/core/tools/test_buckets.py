"""Commands on a bucket's URL, on a real S3 server and through a proxy that makes requests fail."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dbuffer
from dbuffer.format.objects import (
    POINTER_OBJECT,
)
from dbuffer.mirror.bucket import Bucket
from dbuffer.mirror.bucket_source import newest_version
from dbuffer.testing.patterns import Sparse
from dbuffer.testing.waiting import TIMEOUT_S, until
from tests.support.children import Command, call
from tests.support.object_store import Answer, Exchange, Request, status
from tests.support.ports import free_port
from tests.support.terminals import Terminal

pytestmark = pytest.mark.timing(
    bucket_list_s=0.05,
    bucket_records_s=0.05,
    request_retry_s=0.01,
    retry_min_s=0.05,
    retry_max_s=0.1,
)

LONG = Sparse(num_tensors=9, numel=1 << 14)
BUCKET = "s3://bucket/policy"


@contextlib.contextmanager
def mirrored(remote: Path, url: str, *, checksum: bool = True) -> Iterator[dbuffer.WeightSender]:
    """A sender, whose three versions are in a bucket: an anchor and two deltas."""
    with (
        dbuffer.WeightSender(remote, checksum=checksum, delta=True) as sender,
        dbuffer.Mirror(remote, url, poll_interval_s=0.05) as up,
    ):
        up.start()
        for version in (1, 2, 3):
            sender.send(LONG.weights(version), metadata={"step": 10 * version})
            up.wait_until_current(TIMEOUT_S)
        yield sender


@pytest.fixture
def url(remote: Path, bucket_url: str) -> str:
    """URL of a bucket with three versions."""
    with mirrored(remote, bucket_url):
        return bucket_url


@pytest.fixture
def bucket(url: str) -> Iterator[Bucket]:
    with Bucket(url) as bucket:
        yield bucket


def status_of(capsys: pytest.CaptureFixture[str], url: str) -> dict[str, Any]:
    code, out, err = call(capsys, "status", url, "--json")
    assert (code, err) == (0, "")
    return dict(json.loads(out))


def damage(bucket: Bucket, name: str) -> None:
    """Flip a bit of an object; near its end, where no digit of a number may mean the same."""
    data = bytearray(bucket.get_range(name, 0, bucket.list("")[name].num_bytes))
    data[-len(data) // 20] ^= 1
    bucket.put(name, bytes(data))


# status


def test_status_of_a_bucket(capsys, remote, local, bucket_url):
    with (
        mirrored(remote, bucket_url) as sender,
        dbuffer.Mirror(bucket_url, local, poll_interval_s=0.05) as down,
        Bucket(bucket_url) as bucket,
    ):
        down.start().wait_until_current(TIMEOUT_S)
        with dbuffer.WeightReceiver(local, receiver_id="engine-1") as receiver:
            receiver.load_into(LONG.empty())
            sender.send(LONG.weights(4), version=5, metadata={"step": 50})
            down.wait_until_current(TIMEOUT_S)

            def engine() -> dict[str, Any] | None:
                found = status_of(capsys, bucket_url)["receivers"]
                return next((each for each in found if each["applied_version"] == 3), None)

            until("the mirror relays", engine)
            until("version 5 is in the bucket", lambda: newest_version(bucket).id.number == 5)
            lag = engine()
        seen = status_of(capsys, bucket_url)
        _, out, _ = call(capsys, "status", bucket_url)
        pointer = newest_version(bucket)
    assert (lag["receiver"], lag["lag_versions"], lag["lag_steps"]) == ("engine-1", 2, 20)
    assert lag["is_alive"] is True
    assert (seen["store"], seen["version"], seen["problems"]) == (bucket_url, 5, [])
    assert (seen["run"], seen["writer"]) == (pointer.id.run, None)
    [version] = seen["buffers"]
    assert (version["version"], version["num_tensors"], version["has_checksums"]) == (5, 9, True)
    assert (version["num_deltas"], version["is_whole"]) == (3, False)
    assert version["deltas_until_anchor"] == 61
    assert 0 < version["bytes_until_anchor"] < version["file_bytes"] // 2
    assert re.search(r"^next anchor after 61 versions or [\d.]+ kB of deltas$", out, re.MULTILINE)
    assert out.startswith(f"{bucket_url} (bucket): version 5\n")
    assert re.search(r"newest +5 +9 .* 3 ", out)


def test_status_says_who_looks_dead(capsys, remote, local, bucket_url, timing):
    with mirrored(remote, bucket_url), dbuffer.Mirror(bucket_url, local) as down:
        down.start().wait_until_current(TIMEOUT_S)
        with dbuffer.WeightReceiver(local, receiver_id="engine-1") as receiver:
            receiver.load_into(LONG.empty())
            until("both are there", lambda: len(status_of(capsys, bucket_url)["receivers"]) == 2)
            assert all(each["is_alive"] for each in status_of(capsys, bucket_url)["receivers"])
            timing.bucket_heartbeat_s = -1.0
            seen = status_of(capsys, bucket_url)
        assert not any(each["is_alive"] for each in seen["receivers"])
    seen = status_of(capsys, bucket_url)
    assert {each["is_alive"] for each in seen["receivers"]} == {False}
    assert seen["problems"] == []


def test_status_names_what_is_wrong(capsys, bucket, url):
    damaged = f"receivers/mirror-node-{0:016}.json"
    for name in (damaged, "receivers/mine.json"):  # another program's, which is not read
        bucket.put(name, b"{}")
    seen = status_of(capsys, url)
    assert seen["receivers"] == []
    [problem] = seen["problems"]
    assert f"{url}/{damaged}" in problem
    assert call(capsys, "status", url)[1].splitlines()[1] == problem
    bucket.delete([damaged])
    file = newest_version(bucket).weights_file.name
    bucket.put(file, b"cut")
    for name in (file, POINTER_OBJECT):
        [problem] = status_of(capsys, url)["problems"]
        assert f"{url}/{name} is missing" in problem
        bucket.delete([POINTER_OBJECT])


def test_a_status_costs_few_requests(capsys, proxy, url):
    before = len(proxy.requests)
    status_of(capsys, url)
    made = [(each.method, "list-type" in each.query) for each in proxy.requests[before:]]
    assert made == [("GET", False), ("GET", True), ("GET", True)]


@pytest.mark.timing(bucket_watch_s=0.2)
def test_a_watched_bucket_is_read_again(proxy, remote, bucket_url):
    with mirrored(remote, bucket_url) as sender, Terminal("status", bucket_url, "--watch") as shown:
        shown.wait_for(lambda lines: lines and " (bucket): version 3" in lines[0])
        sender.send(LONG.weights(4))
        shown.wait_for(lambda lines: lines and " (bucket): version 4" in lines[0])
        shown.signal(signal.SIGTERM)
        assert shown.wait_for_end() == (-signal.SIGTERM, [])


def test_a_damaged_record(capsys, bucket, url):
    damage(bucket, POINTER_OBJECT)
    code, _, err = call(capsys, "status", url)
    assert (code, url in err) == (1, True)


# doctor


def test_a_good_bucket(capsys, bucket, url):
    """Objects in it are not touched."""
    bucket.put("notes/mine.txt", b"mine")
    before = bucket.list("")
    code, out, _ = call(capsys, "doctor", url, "--json")
    examination = json.loads(out)
    assert (code, examination["is_sound"]) == (0, True)
    assert {each["verdict"] for each in examination["findings"]} == {"good"}
    assert [each["probe"] for each in examination["findings"]] == [
        *("get", "list", "put records", "get after put", "list after put", "conditional get"),
        *("ranges", "clock", "put versions", "conditional put", "put in parts", "delete"),
    ]
    assert bucket.list("") == before


NEED_RECORDS = ("get after put", "list after put", "conditional get", "ranges", "clock")
NEED_GETS = ("get after put", "conditional get", "ranges", "put in parts")
NEED_VERSIONS = ("conditional put", "put in parts")


def refuse(*methods: str, lists: bool = False) -> Callable[[Request], bool]:
    """Whether a request needs a right that is not given."""
    return lambda each: each.method in methods and ("list-type" in each.query) is lists


@pytest.mark.parametrize(
    ("when", "code", "missing"),
    [
        (refuse("GET"), 1, dict.fromkeys(("get", *NEED_GETS), "broken")),
        (
            refuse("GET", lists=True),
            1,
            dict.fromkeys(("list", "list after put", "clock"), "broken"),
        ),
        (
            refuse("PUT"),
            0,
            dict.fromkeys(("put records", "put versions"), "adapted")
            | dict.fromkeys((*NEED_RECORDS, *NEED_VERSIONS), "unknown"),
        ),
        (
            lambda each: "versions/" in each.path,
            0,
            {"put versions": "adapted"} | dict.fromkeys(NEED_VERSIONS, "unknown"),
        ),
        (
            lambda each: each.method == "DELETE" or each.query.startswith("delete"),
            0,
            {"delete": "adapted"},
        ),
    ],
    ids=["get", "list", "put", "put versions", "delete"],
)
def test_a_right_that_is_missing(capsys, proxy, url, when, code, missing):
    proxy.inject(status(403), when=when, times=10**6)
    done, out, _ = call(capsys, "doctor", url, "--json")
    found = {each["probe"]: each["verdict"] for each in json.loads(out)["findings"]}
    assert done == code
    assert {probe: each for probe, each in found.items() if each != "good"} == missing


class Service:
    """Fault of a proxy: a service that repeats an earlier answer to one kind of request."""

    def __init__(self) -> None:
        self.objects: dict[str, Answer] = {}
        self.firsts: dict[str, Answer] = {}

    def forward(self, exchange: Exchange) -> Answer:
        answer, path = exchange.forward(), exchange.request.path
        if exchange.request.method == "PUT":
            headers = [(name, text) for name, text in answer.headers if name.lower() == "etag"]
            modified = ("Last-Modified", "Tue, 01 Dec 2026 00:00:00 GMT")
            self.objects[path] = Answer(200, [*headers, modified], exchange.body())
        return answer

    def serve_stale(self, exchange: Exchange) -> None:
        """Answer each get and list as the first one of the same kind."""
        answer, request = self.forward(exchange), exchange.request
        if request.method == "GET" and "Range" not in exchange.headers:
            answer = self.firsts.setdefault(f"{request.path}?{request.query}", answer)
        exchange.answer(answer)

    def ignore_headers(self, *names_and_exchange: Any) -> None:
        *names, exchange = names_and_exchange
        answer = self.forward(exchange)
        if any(name in exchange.headers for name in names):
            answer = self.objects.get(exchange.request.path, answer)
        exchange.answer(answer)


def always_unchanged(exchange: Exchange) -> None:
    answer = exchange.forward()
    exchange.answer(Answer(304, [], b"") if "If-None-Match" in exchange.headers else answer)


def early_clock(exchange: Exchange) -> None:
    answer = exchange.forward()
    body = re.sub(rb"(<LastModified>)\d+", rb"\g<1>2020", answer.body)
    exchange.answer(replace(answer, body=body))


def is_get(request: Request) -> bool:
    return request.method == "GET" and "list-type" not in request.query


@pytest.mark.parametrize(
    ("fault", "when", "broken"),
    [
        (
            Service().serve_stale,
            lambda each: "/receivers/" in each.path,
            {"get after put", "conditional get"},
        ),
        (Service().serve_stale, refuse("GET", lists=True), {"list after put"}),
        (
            partial(Service().ignore_headers, "If-None-Match"),
            lambda each: "versions/" not in each.path,
            {"conditional get"},
        ),
        (always_unchanged, is_get, {"conditional get"}),
        (partial(Service().ignore_headers, "Range"), None, {"ranges", "put in parts"}),
        (early_clock, refuse("GET", lists=True), {"clock"}),
        (
            partial(Service().ignore_headers, "If-None-Match", "If-Match"),
            refuse("PUT"),
            {"conditional put"},
        ),
        (status(501), refuse("POST"), {"put in parts"}),
    ],
    ids=[
        *("stale gets", "stale lists", "conditional gets ignored", "always unchanged"),
        *("ranges ignored", "clock", "conditional puts ignored", "no parts"),
    ],
)
def test_a_service_that_lacks_what_mirrors_need(capsys, proxy, url, fault, when, broken):
    proxy.inject(fault, when=when or (lambda _: True), times=10**6)
    code, out, _ = call(capsys, "doctor", url, "--json")
    verdicts = {each["probe"]: each["verdict"] for each in json.loads(out)["findings"]}
    assert code == 1
    assert {probe for probe, verdict in verdicts.items() if verdict == "broken"} == broken


# Errors


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_a_bucket_that_cannot_be_reached(capsys, proxy, bucket_url, command):
    for url, reason in (
        ("s3://no-such-bucket/policy", "NoSuchBucket"),
        (bucket_url, "error sending request"),
    ):
        if url == bucket_url:
            proxy.close()
        code, out, err = call(capsys, command, url)
        assert code == 1
        if command == "doctor":
            assert "cannot get" in out
            assert reason in out
        else:
            assert (out, err.count("\n")) == ("", 1)
            assert err.startswith(f"dbuffer: cannot get {url}/CURRENT: ")
            assert reason in err


@pytest.fixture
def no_credentials(monkeypatch: pytest.MonkeyPatch) -> str:
    """Start of the message of a process that has none, nor a service that gives it some."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return f"no credentials for {BUCKET}: set AWS_ACCESS_KEY_ID "


def test_a_bucket_without_credentials(capsys, no_credentials):
    code, _, err = call(capsys, "status", BUCKET)
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(f"dbuffer: {no_credentials}")
    code, out, err = call(capsys, "doctor", BUCKET)
    assert (code, err) == (1, "")
    assert no_credentials in " ".join(out.split())


@pytest.mark.parametrize("ends", [(BUCKET, "y"), ("x", BUCKET)], ids=["down", "up"])
def test_a_mirror_waits_for_credentials(monkeypatch, shm_path, no_credentials, caplog, ends):
    """A service that gives a host its role's credentials may be away for a while."""
    monkeypatch.chdir(shm_path)
    with dbuffer.WeightSender("x") as sender, dbuffer.Mirror(*ends) as mirror:
        sender.send({"a": torch.ones(3)})
        with contextlib.suppress(dbuffer.WaitTimeoutError):
            mirror.start(0.1)
        until("it is told", lambda: no_credentials in caplog.text)
        assert mirror.error is None


def test_a_mirror_that_was_superseded_has_an_exit_code_of_its_own(tmp_path, remote, bucket_url):
    """A supervisor must not start it again."""
    with (
        dbuffer.WeightSender(remote) as sender,
        Command(tmp_path, "mirror", remote, bucket_url) as first,
    ):
        sender.send(LONG.weights(1))
        assert first.line(0).startswith("version 1")
        with dbuffer.Mirror(remote, bucket_url, poll_interval_s=0.05).start() as second:
            second.wait_until_current(TIMEOUT_S)
            sender.send(LONG.weights(2))
            code, _, err = first.communicate()
    assert code == 4
    assert "this one must stop" in err


@pytest.mark.parametrize("has_others", [True, False])
def test_nothing_was_published(capsys, bucket_url, has_others):
    with Bucket(bucket_url) as bucket:
        if has_others:
            for name in ("model.safetensors", "a/b/c.json"):
                bucket.put(name, b"something else")
        before = bucket.list("")
        for command, code in (("status", 1), ("doctor", 0)):
            done, _, err = call(capsys, command, bucket_url)
            assert done == code
            assert (f"nothing was published in {bucket_url}" in err) is (code > 0)
        assert bucket.list("") == before


LOOKING = ("status URL", "doctor URL")
TAKING = (*LOOKING, "mirror URL y", "mirror x URL")
FOLLOWING = ("ls URL", "verify URL", "follow URL")
KEEPING = ("pin URL 1", "unpin URL 1", "rollback URL 1")
BOTH = ("`dbuffer mirror` copies between a bucket and a directory",)
WITHOUT_EFFECT = {
    "--allow-shared-store": ("status URL",),
    "--peer": ("doctor URL",),
}


@pytest.mark.parametrize(
    ("url", "commands", "texts"),
    [
        *(
            (url, TAKING, (f"a URL such as {BUCKET}",))
            for url in ("s3:///policy", "gs://", "s3:/bucket/policy", "S3://bucket/policy")
        ),
        *(
            (url, TAKING, ("without ? and #",))
            for url in ("s3://bucket/run#2", "s3://bucket/run?region=x")
        ),
        (
            "foo://bucket/policy",
            (*TAKING, *FOLLOWING, KEEPING[0]),
            ("foo: is not the scheme of an object storage",),
        ),
        (
            "http://localhost:8000",
            (*TAKING, *FOLLOWING, KEEPING[0]),
            ("the address of a server (are two arguments swapped?)",),
        ),
        (BUCKET, ("publish CHECKPOINT URL", *FOLLOWING, *KEEPING), BOTH),
        *(
            (
                BUCKET,
                [f"{command} {option}" for command in commands],
                (f"{option.split()[0]} has no effect on a bucket",),
            )
            for option, commands in WITHOUT_EFFECT.items()
        ),
    ],
)
def test_a_url_that_a_command_does_not_take(capsys, tmp_path, url, commands, texts):
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    for command in commands:
        arguments = command.replace("URL", url).replace("CHECKPOINT", str(tmp_path)).split()
        code, _, err = call(capsys, *arguments)
        assert code == 2, command
        assert all(text in " ".join(err.split()) for text in texts), command
