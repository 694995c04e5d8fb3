"""The command line, run as a user runs it: a process, its output, its exit code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import dbuffer
from dbuffer import cli


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dbuffer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    tensors = {f"layers.{i}.weight": torch.full((4, 8), float(i)) for i in range(3)}
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture
def store(tmp_path: Path, checkpoint: Path) -> Path:
    """Two versions, both with checksums."""
    path = tmp_path / "a store"
    with dbuffer.WeightSender(path, checksum=True) as sender:
        sender.send(checkpoint)
        sender.send(checkpoint, metadata={"step": 2})
    return path


def newest_file(store: Path) -> Path:
    with dbuffer.WeightReceiver(store) as receiver, receiver.open(acknowledge=False) as snapshot:
        return snapshot.path


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """The same in this process, for what needs no process of its own."""
    code = cli.run([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_publish_then_read(tmp_path, checkpoint):
    store = tmp_path / "store"
    done = run("publish", checkpoint, store, "--metadata", '{"step": 80}', "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert "version 1: 3 tensors" in done.stdout
    with dbuffer.WeightReceiver(store, verify=True) as receiver, receiver.open() as snapshot:
        assert snapshot.metadata == {"step": 80}
        tensor = snapshot.tensors["layers.2.weight"]
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor, torch.full((4, 8), 2.0, dtype=torch.bfloat16))


def test_publish_json_and_versions(capsys, tmp_path, checkpoint):
    store = tmp_path / "store"
    code, out, _ = call(capsys, "publish", checkpoint, store, "--json", "--version", 7)
    assert code == 0
    assert json.loads(out)["version"] == 7
    code, out, err = call(capsys, "publish", checkpoint, store, "--version", 7)
    assert (code, out) == (1, "")
    assert err.startswith("dbuffer: version 7 is not above version 7")
    assert err.count("\n") == 1


def test_errors_are_one_line_and_debug_a_traceback(tmp_path):
    arguments = ("publish", tmp_path / "none", tmp_path / "store")
    plain = run(*arguments)
    assert plain.returncode == 1
    assert plain.stderr.splitlines() == [f"dbuffer: there is no checkpoint at {tmp_path / 'none'}"]
    debug = run(*arguments, "--debug")
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr
    assert "InvalidWeightsError" in debug.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("publish",),
        ("status", "x", "--colour"),
        ("publish", "a", "b", "--dtype", "q"),
        ("follow", "x", "--partial"),  # what is loaded, and where to, is up to the command
    ],
)
def test_wrong_usage_is_exit_code_2(capsys, arguments):
    assert call(capsys, *arguments)[0] == 2


@pytest.mark.parametrize("command", ["publish", "follow", "status", "verify", "ls", "demo"])
def test_help_of_each_command(capsys, command):
    code, out, _ = call(capsys, command, "--help")
    assert code == 0
    assert command in out


def test_version_option(capsys):
    code, out, _ = call(capsys, "--version")
    assert (code, out.strip()) == (0, dbuffer.__version__)


def test_status_tells_versions_receivers_and_lag(capsys, store):
    target = {f"layers.{i}.weight": torch.zeros(4, 8) for i in range(3)}
    with dbuffer.WeightReceiver(store, receiver_id="engine-0") as receiver:
        receiver.load_into(target)
    with dbuffer.WeightSender(store) as sender:
        sender.send(target)
        code, out, _ = call(capsys, "status", store, "--json")
    status = json.loads(out)
    assert code == 0
    assert status["version"] == 3
    assert status["writer"]["is_alive"] is True
    assert {buffer["state"] for buffer in status["buffers"]} == {"newest", "previous"}
    (seen,) = status["receivers"]
    assert (seen["receiver"], seen["applied_version"], seen["lag_versions"]) == ("engine-0", 2, 1)
    code, out, _ = call(capsys, "status", store)
    assert code == 0
    assert "engine-0" in out


def test_status_shows_who_holds_a_buffer(capsys, store):
    with dbuffer.WeightReceiver(store, receiver_id="reader") as receiver, receiver.open():
        _, out, _ = call(capsys, "status", store, "--json")
    held = {buffer["state"]: buffer["held_by"] for buffer in json.loads(out)["buffers"]}
    assert held == {"newest": ["reader"], "previous": []}


def test_verify_names_the_damaged_tensor(capsys, store):
    assert call(capsys, "verify", store)[0] == 0
    file = newest_file(store)
    data = bytearray(file.read_bytes())
    data[4 * 8 * 4 + 5] ^= 1  # in the second tensor
    file.write_bytes(data)
    code, out, _ = call(capsys, "verify", store)
    assert code == 1
    assert "layers.1.weight" in out
    assert "layers.0.weight" not in out
    code, out, _ = call(capsys, "verify", store, "--json")
    newest, previous = json.loads(out)
    assert newest["problems"] == ["layers.1.weight"]
    assert previous["problems"] == []


def test_verify_refuses_a_truncated_file(capsys, store):
    file = newest_file(store)
    file.write_bytes(file.read_bytes()[:-100])
    code, out, _ = call(capsys, "verify", store)
    assert code == 1
    assert file.name in out


def test_verify_without_checksums_says_so(capsys, tmp_path, checkpoint):
    store = tmp_path / "store"
    assert call(capsys, "publish", checkpoint, store, "--no-checksum")[0] == 0
    code, out, _ = call(capsys, "verify", store)
    assert code == 0
    assert "no checksums" in out


def test_nothing_published_is_exit_code_3(capsys, tmp_path):
    (tmp_path / "empty").mkdir(mode=0o700)
    for command in ("verify", "ls"):
        assert call(capsys, command, tmp_path / "empty")[0] == 3
    code, _, err = call(capsys, "follow", tmp_path / "empty", "--timeout-s", 0.2)
    assert code == 3
    assert err.startswith("dbuffer: nothing new")
    assert call(capsys, "status", tmp_path / "missing")[0] == 1


def test_ls(capsys, store):
    code, out, _ = call(capsys, "ls", store, "--json")
    listed = json.loads(out)
    assert code == 0
    assert listed["tensors"][1] == {
        "name": "layers.1.weight",
        "dtype": "float32",
        "shape": [4, 8],
        "num_bytes": 128,
    }
    code, out, _ = call(capsys, "ls", store)
    assert "4x8" in out
    assert not list((store / "receivers").iterdir()), "looking is not receiving"


def test_follow_runs_a_command_and_acknowledges(tmp_path, store):
    log = tmp_path / "log"
    command = f'echo "$DBUFFER_VERSION $DBUFFER_METADATA" >> {log}; test -s "$DBUFFER_WEIGHTS"'
    done = run("follow", store, "--count", 1, "--exec", command, "--receiver-id", "me")
    assert done.returncode == 0, done.stderr
    assert "version 2: 3 tensors" in done.stdout
    assert log.read_text() == '2 {"step": 2}\n'
    with dbuffer.WeightSender(store) as sender:
        sender.wait_applied(2, receivers=1, timeout_s=0)


def test_follow_stops_at_a_failing_command_and_acknowledges_nothing(capsys, store):
    code, _, err = call(capsys, "follow", store, "--count", 1, "--exec", "exit 9")
    assert code == 1
    assert "ended with 9" in err
    with dbuffer.WeightSender(store) as sender, pytest.raises(TimeoutError):
        sender.wait_applied(2, receivers=1, timeout_s=0)


def test_follow_sees_versions_as_they_come(store, checkpoint):
    command = [sys.executable, "-m", "dbuffer", "follow", store, "--json", "--count", "3"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline())["version"] == 2
        with dbuffer.WeightSender(store) as sender:
            for version in (3, 4):
                sender.send(checkpoint)
                assert json.loads(follower.stdout.readline())["version"] == version
        assert follower.wait(timeout=30) == 0


@pytest.mark.parametrize("partial", [True, False])
def test_an_engine_is_told_whether_parts_will_do(capsys, monkeypatch, store, partial):
    told = []
    monkeypatch.setattr(
        cli, "_follow_with_server", lambda url, make, **_: told.append(make.args[1])
    )
    arguments = ["follow", store, "--vllm", "http://localhost:1", *["--partial"] * partial]
    assert call(capsys, *arguments)[0] == 0
    assert [options.partial for options in told] == [partial]
