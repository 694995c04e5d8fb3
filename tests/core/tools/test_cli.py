"""The command line, run as a user runs it: a process, its output, its exit code."""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import dbuffer
from dbuffer.__main__ import main
from dbuffer.receive.reader import verify_store
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.open_version import open_newest
from dbuffer.testing.waiting import until
from dbuffer.tools import cli
from dbuffer.tools.commands import follow
from dbuffer.tools.commands.shared import stopped_by_signals
from tests.support.children import Child, Command, call
from tests.support.stores import contents

FILE = "model.safetensors"
TWO_FILES = "consolidated.safetensors and model.safetensors"
NO_STORE = "there is no store at checkpoint, which holds model.safetensors, and no store"
EXAMPLE = """write it as '{"step": 80}'"""
TENSORS = {f"layers.{i}.weight": torch.full((4, 8), float(i)) for i in range(3)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    save_file(TENSORS, directory / "model.safetensors")
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


def published(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Publish, and return what the command prints."""
    code, out, err = call(capsys, "publish", *arguments)
    assert code == 0, err
    return out


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("bfloat16", torch.bfloat16), ("bf16", torch.bfloat16), ("fp16", torch.half)],
)
def test_publish_then_read(capsys, tmp_path, checkpoint, name, dtype):
    store = tmp_path / "store"
    options = ["--metadata", '{"step": 80}', "--dtype", name, "--version", 7, "--json"]
    assert json.loads(published(capsys, checkpoint, store, *options))["version"] == 7
    with dbuffer.WeightReceiver(store, verify=True) as receiver, receiver.open() as snapshot:
        assert snapshot.metadata == {"step": 80}
        tensor = snapshot.tensors["layers.2.weight"]
        assert torch.equal(tensor, torch.full((4, 8), 2.0, dtype=dtype))
        assert {each.dtype for each in snapshot.tensors.values()} == {dtype}


@pytest.fixture(scope="module")
def places(directory: Path) -> Path:
    """Directories that commands are to leave as they are."""
    for name in ("checkpoint", "two files"):
        (directory / name).mkdir()
        save_file(TENSORS, directory / name / FILE)
    save_file(TENSORS, directory / "two files" / "consolidated.safetensors")
    for name in ("store", "damaged"):
        with dbuffer.WeightSender(directory / name, checksum=True) as sender:
            for _ in range(2):
                sender.send(directory / "checkpoint")
    file = newest_file(directory / "damaged")
    file.write_bytes(file.read_bytes()[:-100])
    (directory / "empty").mkdir(mode=0o700)
    dbuffer.WeightSender(directory / "unpublished").close()
    rule = {"pattern": "layers.[0-9].weight", "to": "one"}
    (directory / "one.json").write_text(json.dumps({"rules": [rule]}))
    return directory


@pytest.mark.parametrize(
    ("code", "command", "text"),
    [
        (2, "", "Usage: dbuffer "),
        (2, "statu x", "'status'"),
        (2, "--json status x", "--json"),
        (2, "status x --wat", "--wat"),
        (2, "publish", "Missing argument 'CHECKPOINT'"),
        (2, "follow x --pause abort", "--pause"),
        (2, "follow x --timeout-s nan", "invalid timeout_s nan"),
        (2, "follow x --every 0", "invalid every 0"),
        (2, "follow x --when step", "invalid --when 'step'"),
        (2, "follow x --when step=0", "invalid --when 'step=0'"),
        (2, "mirror x y --count 0", "'--count'"),
        (2, "mirror x y --metrics-port 65536", "'--metrics-port'"),
        (2, "ls ''", "an empty path: is a shell variable not set?"),
        (2, "mirror '' y", "an empty path: is a shell variable not set?"),
        # Options that have no effect.
        (2, "status store --watch --json", "--watch"),
        (2, "status store --watch --check", "--watch"),
        (2, "status store --watch", "--watch needs a terminal"),
        (2, "publish checkpoint x --watch --version 3", "--watch and --version cannot be combined"),
        (2, "publish checkpoint x --count 1", "--count needs --watch"),
        (2, f"publish checkpoint/{FILE} x --watch", "--watch needs a directory, and "),
        # Arguments that are not what they should be.
        (2, "publish store checkpoint", "did you swap CHECKPOINT and STORE?"),
        (2, "publish checkpoint checkpoint", "give the store a directory of its own"),
        (1, "publish missing x", "there is no checkpoint at missing: "),
        (1, "publish missing store", "there is no checkpoint at missing: "),
        (2, "publish checkpoint x --metadata step=3", EXAMPLE),
        (2, "publish checkpoint x --metadata [3]", EXAMPLE),
        (2, "publish checkpoint store --metadata '{step: 3}'", EXAMPLE),
        (1, """publish checkpoint x --metadata '{"loss": NaN}'""", "cannot be stored as JSON"),
        (2, "publish checkpoint x --dtype bf61", "use bf16, fp16, fp32, "),
        (2, "publish checkpoint store --dtype int8", "invalid --dtype 'int8'"),
        (1, "publish checkpoint store --version 2", "version 2 is not above version 2"),
        (2, "publish checkpoint store --rename missing", "cannot read names from missing"),
        (1, "publish checkpoint x --rename one.json", "the same name: ['one']"),
        (1, "publish checkpoint store --rename one.json", "the same name: ['one']"),
        (1, "publish 'two files' store", f"{TWO_FILES} both hold layers.0.weight, "),
        (3, "verify unpublished", "nothing was published in"),
        (3, "ls unpublished", "nothing was published in"),
        (3, "follow empty --timeout-s 0.2", "no new version within 0.2 s in "),
        (1, "status missing", "there is no store"),
        (1, "status empty", "there is no store at empty: the directory has no files of a store"),
        *((1, f"{command} checkpoint", NO_STORE) for command in ("status", "verify", "ls")),
        *((1, f"{command} checkpoint 1", NO_STORE) for command in ("pin", "unpin", "rollback")),
        (2, "pin 2 empty", "is not a version number (are STORE and VERSION swapped?)"),
        (2, "pin empty x", "'x' is not a version number"),
        (1, "pin store 9", "version 9 is not in"),
        (1, "unpin missing 1", "there is no store"),
        (1, "unpin store 1", "is not pinned"),
        (1, "rollback store 9", "version 9 is not in"),
        (1, "rollback damaged 2", " bytes, and was published with "),
        (1, "rollback missing 1", "there is no store"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_touched(
    monkeypatch, capsys, places, code, command, text
):
    monkeypatch.chdir(places)
    before = contents(places)
    done, out, err = call(capsys, *shlex.split(command))
    assert (done, out) == (code, "")
    assert err.startswith("Usage: ") or all(line[:9] == "dbuffer: " for line in err.splitlines())
    assert text in " ".join(err.split())
    assert "use bf16" not in text or "int8" not in err
    assert contents(places) == before


def test_a_variable_names_the_store(monkeypatch, capsys, store, checkpoint):
    monkeypatch.setenv("DBUFFER_STORE", str(store))
    for command in ("status", "ls --json", "pin 2", "follow --count 1", "rollback 1", "doctor"):
        code, _, err = call(capsys, *shlex.split(command))
        assert code == 0, err
    assert "version 4" in published(capsys, checkpoint)
    assert "version 1:" in published(capsys, checkpoint, store.parent / "other")
    assert "Missing argument 'STORE'" in call(capsys, "pin")[2]
    assert call(capsys, "status", store.parent / "nowhere")[0] == 1


def test_completion(monkeypatch, capsys):
    """The shell asks for it in this way after `--install-completion`."""
    monkeypatch.setenv("_DBUFFER_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "dbuffer fol")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert call(capsys)[1].split() == ["follow"]


def test_follow_skips_versions(tmp_path):
    store = tmp_path / "store"
    chosen = ("--every", 2, "--when", "step=3", "--when", "a=b=1")
    with (
        dbuffer.WeightSender(store) as sender,
        Command(tmp_path, "follow", store, "--json", "--count", 2, *chosen) as follower,
    ):
        for version in range(1, 13):
            sender.send({"w": torch.zeros(8)}, metadata={"step": version, "a=b": version})
            if version % 6 == 0:
                assert json.loads(follower.line(version // 6 - 1))["version"] == version
        assert follower.wait(30) == 0


@pytest.mark.parametrize("command", ["follow", "mirror"])
def test_waiting_for_a_store_is_said(tmp_path, checkpoint, command):
    store = tmp_path / "store"
    local = [tmp_path / "local"] if command == "mirror" else []
    with Command(tmp_path, command, store, *local, "--json", "--count", 1) as waiting:
        said = waiting.line_of_errors(0)
        with dbuffer.WeightSender(store) as sender:
            sender.send(checkpoint)
            code, out, err = waiting.communicate()
    assert said.endswith(f"waiting for a first version in {store}, which does not exist")
    assert (code, err) == (0, f"{said}\n")
    assert json.loads(out)["version"] == 1


def test_a_signal_may_come_while_the_event_that_it_sets_is_looked_at():
    with pytest.raises(SystemExit) as caught, stopped_by_signals() as stop:
        with stop._cond:  # as for a moment in `stop.wait`
            signal.raise_signal(signal.SIGTERM)
        assert stop.wait(10)
    assert caught.value.code == 143


def test_status_tells_versions_receivers_and_lag(capsys, store):
    target = {name: torch.zeros_like(tensor) for name, tensor in TENSORS.items()}
    with dbuffer.WeightReceiver(store, receiver_id="engine-0") as receiver:
        with dbuffer.WeightSender(store) as sender:
            sender.send(target)
            receiver.load_into(target)
            sender.send(target, version=4, metadata={"step": 75, "loss": 0.5})
            receiver.load_into(target)
            sender.send(target, version=6, metadata={"step": 80.5})
            code, out, _ = call(capsys, "status", store, "--json")
    status = json.loads(out)
    assert code == 0
    assert status["version"] == 6
    assert status["writer"]["is_alive"] is True
    assert {buffer["state"] for buffer in status["buffers"]} == {"newest", "previous"}
    (seen,) = status["receivers"]
    assert (seen["receiver"], seen["applied_version"], seen["lag_versions"]) == ("engine-0", 4, 2)
    assert seen["metadata"] == {"step": 75, "loss": 0.5}
    assert seen["lag_steps"] == 5.5
    code, out, _ = call(capsys, "status", store)
    assert code == 0
    assert "engine-0" in out
    assert re.search(r"engine-0 .* 4 +75 +2 +5\.5 ", out)
    assert re.search(r"; no sender \(last: pid \d+ on [^,]*\)\n", out)


def send_and_die(_: Connection, store: Path) -> None:
    sender = dbuffer.WeightSender(store)
    sender.send(TENSORS)
    os.kill(os.getpid(), signal.SIGKILL)


def test_status_tells_a_killed_sender_from_a_closed_one(capsys, store):
    def look() -> tuple[int, dict[str, Any]]:
        code, out, _ = call(capsys, "status", store, "--check", "--json")
        return code, json.loads(out)

    assert (look()[0], look()[1]["writer"]["was_closed"]) == (0, True)
    script = f"import dbuffer, torch; s = dbuffer.WeightSender({str(store)!r}); s.send({{}})"
    subprocess.run([sys.executable, "-c", script.replace("{}", '{"a": torch.ones(1)}')], check=True)
    assert (look()[0], look()[1]["writer"]["was_closed"]) == (0, True)
    with Child(send_and_die, store) as child:
        child.wait()
    code, status = look()
    assert (code, status["writer"]["was_closed"], status["writer"]["is_alive"]) == (1, False, False)
    assert "ended without closing the store: killed?" in status["problems"][0]
    assert call(capsys, "status", store)[0] == 0
    sender = dbuffer.WeightSender(store)
    assert look()[0] == 0
    sender.close()
    assert look()[1]["problems"] == []


def test_status_tells_what_a_mirror_has_copied(capsys, tmp_path, checkpoint, store):
    local = tmp_path / "local"
    for copied in (2, 2, 3):  # the second mirror finds that all is copied
        if copied == 3:
            with dbuffer.WeightSender(store) as sender:
                sender.send(checkpoint)
        with dbuffer.Mirror(store, local, poll_interval_s=0.05).start() as mirror:
            mirror.wait_until_current()
        (seen,) = json.loads(call(capsys, "status", store, "--json")[1])["receivers"]
        assert (seen["applied_version"], seen["copied_version"]) == (None, copied)
        assert (seen["staged_version"], seen["lag_versions"]) == (None, 0)
    with dbuffer.WeightSender(store) as sender:
        sender.send(checkpoint)
    assert re.search(r"copied version .* 3 +1 ", call(capsys, "status", store)[1], re.S)


def test_status_of_an_engine_that_holds_a_buffer(capsys, store):
    with (
        dbuffer.WeightReceiver(store, receiver_id="engine") as engine,
        dbuffer.WeightReceiver(store, receiver_id="engine.rank-0") as rank,
    ):
        engine.load_into(list)
        rank.record.write(part_of="engine", token=engine.record.current.token)
        with engine.open(acknowledge=False):
            _, out, _ = call(capsys, "status", store)
            status = json.loads(call(capsys, "status", store, "--json")[1])
    *_, of_engine, of_rank = (line.split() for line in out.splitlines())
    assert (of_engine[0], of_rank[:2]) == ("engine", ["engine.rank-0", "engine"])
    held = {buffer["state"]: buffer["held_by"] for buffer in status["buffers"]}
    assert held == {"newest": ["engine"], "previous": []}


def test_verify(capsys, tmp_path, store, checkpoint):
    assert call(capsys, "verify", store)[0] == 0
    file = newest_file(store)
    whole = file.read_bytes()
    data = bytearray(whole)
    data[4 * 8 * 4 + 5] ^= 1  # in the second tensor
    file.write_bytes(data)
    code, out, _ = call(capsys, "verify", store)
    assert code == 1
    assert "layers.1.weight" in out
    assert "layers.0.weight" not in out
    newest, previous = json.loads(call(capsys, "verify", store, "--json")[1])
    assert newest["problems"] == ["layers.1.weight"]
    assert previous["problems"] == []
    file.write_bytes(whole[:-100])
    code, out, _ = call(capsys, "verify", store)
    assert (code, file.name in out) == (1, True)
    with dbuffer.WeightSender(tmp_path / "unchecked") as sender:
        sender.send(checkpoint)
    code, out, _ = call(capsys, "verify", tmp_path / "unchecked")
    assert (code, "no checksums" in out) == (0, True)


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
    assert [line.split() for line in out.splitlines()[:2]] == [
        ["name", "dtype", "shape", "num", "bytes"],
        ["layers.0.weight", "float32", "4,", "8", "128", "B"],
    ]
    assert not list((store / "receivers").iterdir()), "looking is not receiving"


def test_output_into_a_pipe_that_nothing_reads_ends_the_command(store):
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "dbuffer", "ls", str(store)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
def test_closed_streams_hinder_nothing(tmp_path, store, checkpoint, closed):
    """As a supervisor may start it: what would go there is lost, and stays out of the store."""
    for name, *arguments in (("publish", checkpoint, store), ("verify", store)):
        with Command(tmp_path, name, *arguments, closed=closed) as command:
            code, out, err = command.communicate()
        assert (code, "Traceback" in err) == (0, False)
    assert bool(out) is (1 not in closed)


def test_a_publish_says_for_which_receiver_it_waits(tmp_path, store, checkpoint):
    with contextlib.ExitStack() as held:
        receiver = held.enter_context(dbuffer.WeightReceiver(store, receiver_id="me"))
        held.enter_context(receiver.open())
        with dbuffer.WeightSender(store) as sender:
            sender.send(checkpoint)
        with Command(tmp_path, "publish", checkpoint, store) as publishing:
            said = publishing.line_of_errors(0)
            held.close()
            code, out, _ = publishing.communicate()
    assert "waiting up to 60 s for receiver me (pid" in said
    assert f"reads version 2 of {store}" in said
    assert (code, out.partition(":")[0]) == (0, "version 4")


def test_a_mirror_that_stands_by_says_so(tmp_path, store):
    local = tmp_path / "local"
    with Command(tmp_path, "mirror", store, local) as first:
        assert first.line(0)
        with Command(tmp_path, "mirror", store, local) as second:
            assert f"another mirror copies into {local}: standing by" in second.line_of_errors(0)


def test_who_only_looks_is_no_receiver_that_a_sender_waits_for(tmp_path, store, checkpoint):
    with dbuffer.WeightSender(store) as sender:
        with Command(tmp_path, "follow", store, "--json", "--count", 3) as follower:
            for number, version in enumerate((2, 3, 4)):
                assert json.loads(follower.line(number))["version"] == version
                if version < 4:
                    sender.send(checkpoint)
            assert follower.wait(30) == 0
        until("its record is gone", lambda: not list((store / "receivers").iterdir()))
        with pytest.raises(dbuffer.WaitTimeoutError):
            sender.wait_applied(2, receivers=1, timeout_s=0)


def follow_and_drop_a_signal(connection: Connection, store: Path, number: int) -> None:
    """Get a signal in the callback of a weak reference: Python drops its exception there."""
    report = follow.shared.show

    def end(_: object) -> None:
        os.kill(os.getpid(), number)
        for _ in range(100):  # Python handles the signal here
            pass

    def report_and_get_it(*arguments: Any, **options: Any) -> None:
        report(*arguments, **options)
        thing = io.StringIO()
        reference = weakref.ref(thing, end)
        del thing
        connection.send(reference() is None)

    follow.shared.show = report_and_get_it
    sys.argv = ["dbuffer", "follow", str(store)]
    main()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_whose_exception_is_dropped_ends_follow(store, number):
    with dbuffer.WeightSender(store) as sender:
        sender.send(TENSORS)
    with Child(follow_and_drop_a_signal, store, number) as child:
        assert child.receive()
        assert child.wait() == -number


def test_follow_of_a_store_that_is_begun_anew(tmp_path, store, checkpoint):
    """The next experiment in the same place, whose number is the one that was seen last."""
    with Command(tmp_path, "follow", store, "--json", "--count", 2) as follower:
        assert json.loads(follower.line(0))["version"] == 2
        shutil.rmtree(store)
        with dbuffer.WeightSender(store) as sender:
            sender.send(checkpoint, version=2)
            code, out, err = follower.communicate(60)
        assert code == 0
        assert json.loads(out.splitlines()[1])["version"] == 2
        assert err.count("which does not lead to") == 1


def test_verify_names_what_it_has_read_where_a_version_is_published_meanwhile(
    monkeypatch, store, checkpoint
):
    with dbuffer.WeightSender(store, checksum=True) as sender:
        later = iter([lambda: sender.send(checkpoint)])

        def hold(*arguments: Any, **options: Any) -> Any:
            next(later, lambda: None)()
            return open_newest(*arguments, **options)

        monkeypatch.setattr("dbuffer.receive.reader.open_newest", hold)
        checks = verify_store(DoubleBuffer(store))
    assert [check["version"] for check in checks] == [3, 2]
    assert len({check["buffer"] for check in checks}) == 2


ODD = "[/red]\x1b]0;title\x07\x9b2J\x7f\u202e\u00fc.weight"
SHOWN = r"[/red]\x1b]0;title\x07\x9b2J\x7f\u202eü.weight"


@pytest.fixture
def odd_store(tmp_path: Path) -> Path:
    """Whatever may hold any text does so, the way to the store included."""
    store = tmp_path / "[bold]a\x1b[31m[/]"
    with dbuffer.WeightSender(store, checksum=True) as sender:
        sender.send({ODD: torch.ones(2), "b": torch.ones(3)}, metadata={"run": ODD})
    with dbuffer.WeightReceiver(store, receiver_id="engine-0") as receiver:
        receiver.load_into(list)
        record = receiver.record.path
        told = json.loads(record.read_text())
        told |= {
            "host": ODD[:30],
            "problem": f"{ODD}\nand more",
            "problem_version": told["applied"],
        }
        record.write_text(json.dumps(told))
        yield store


def squeezed(text: str) -> str:
    """Without what a table puts between and into its columns."""
    return "".join(letter for letter in text if letter not in " \n\t")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_nothing_raw_reaches_the_terminal(monkeypatch, tmp_path, odd_store, encoding):
    file = newest_file(odd_store)
    data = bytearray(file.read_bytes())
    data[2] ^= 1  # in the first tensor
    file.write_bytes(data)
    missing = tmp_path / "[/x]\x1b[31m"
    name = squeezed(SHOWN if encoding == "utf-8" else SHOWN.replace("ü", r"\xfc"))
    for arguments, expected, shown in (
        (("ls", odd_store), 0, name),
        (("status", odd_store), 0, name),
        (("verify", odd_store), 1, name),
        (("follow", odd_store, "--count", "1"), 0, "version1:2tensors"),
        (("publish", missing, tmp_path / "[/y]"), 1, r"[/x]\x1b[31m"),
        (("--debug", "ls", missing), 1, "Traceback"),
        (("--help",), 0, "publish"),
    ):
        output = io.BytesIO()
        for stream, errors in (("stdout", "strict"), ("stderr", "backslashreplace")):
            encoded = io.TextIOWrapper(output, encoding, errors, write_through=True)
            monkeypatch.setattr(sys, stream, encoded)
        code = cli.run(list(map(str, arguments)))
        told = output.getvalue().decode(encoding)
        monkeypatch.undo()
        assert code == expected, told
        assert not [c for c in told if not c.isprintable() and c not in "\t\n"], told
        assert ("Traceback" in told) == ("--debug" in arguments), told
        assert shown in squeezed(told), told


def test_what_is_logged_is_made_printable(monkeypatch, tmp_path, odd_store):
    monkeypatch.setenv("COLUMNS", "200")
    (odd_store / "receivers" / "other.json").write_bytes(b'{"format": 2, "\\u001b[31m": 1}')
    with Command(tmp_path, "status", odd_store) as command:
        code, out, err = command.communicate()
    assert code == 0, err
    assert "ignoring an unusable record" in err
    assert "\x1b" not in out + err


def test_a_version_is_exported_as_a_checkpoint(store, checkpoint, tmp_path, capsys):
    (checkpoint / "config.json").write_text("{}")
    directory = tmp_path / "exported"
    code, out, _ = call(capsys, "export", store, directory, "--model", checkpoint, "--json")
    told = json.loads(out)
    assert (code, told["version"], told["directory"]) == (0, 2, str(directory))
    assert {path.name for path in directory.iterdir()} == {"config.json", FILE}
    code, _, err = call(capsys, "export", store, directory)
    message = f"invalid directory '{directory}': use a new or an empty directory"
    assert (code, message in " ".join(err.split())) == (2, True)
    code, out, _ = call(capsys, "export", store, tmp_path / "first", "--version", "1")
    assert (code, out) == (0, f"version 1 of {store} is saved in {tmp_path / 'first'}\n")
