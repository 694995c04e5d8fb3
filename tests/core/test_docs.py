"""README and docs/: what they show is run, what they name exists, and the site builds."""

from __future__ import annotations

import ast
import dataclasses
import fnmatch
import functools
import importlib
import inspect
import json
import pkgutil
import re
import runpy
import shlex
import signal
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import typer.main
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dbuffer
from benchmarks.request_costs import PRICES
from dbuffer import integrations
from dbuffer.format import manifest as records
from dbuffer.format import objects
from dbuffer.format.layout import Layout
from dbuffer.tools.cli import COMMANDS, app, run
from tests.support import ROOT
from tests.support.children import Child, Command
from tests.support.documents import (
    BLOCKS,
    DOCS,
    NOT_RUN,
    PAGES,
    PROGRAM,
    README,
    TUTORIAL,
    blocks,
    relative,
)
from tests.support.soak import IN_SOAKS_ALONE, is_soak
from tests.support.waiting import until
from tests.support.worlds import World

MARKED = [block for block in BLOCKS if block.mark == NOT_RUN]


RUN_UNTIL_STOPPED = ("follow", "exec", "mirror")
TAKE_A_VERSION = ("pin", "unpin", "rollback")
NEED_AN_ENGINE = ("demo", "follow-server")


BUCKET = "s3://my-bucket/toy"
"""Stands for a bucket of the reader's."""


def follow(page: Path, home: Path, bucket: str = BUCKET) -> dict[str, Any]:
    """Do what a page shows, from top to bottom; the namespace that its Python ends with."""
    namespace: dict[str, Any] = {}
    for block in BLOCKS:
        if block.page != page or block.mark is not None:
            continue
        code = block.code.replace("/dev/shm/", f"{home}/").replace("/mnt/shared", f"{home}/shared")
        code = code.replace(BUCKET, bucket)
        assert "/mnt/" not in code
        if block.language == "python":
            assert code != block.code or "Weight" not in code  # no store but in the directory
            lines = "\n" * (block.line - 1)  # a traceback shows the page's
            exec(compile(lines + code, str(page), "exec"), namespace)
        elif block.language == "console":
            for name, *arguments in dbuffer_commands_in(code):
                if name in TAKE_A_VERSION:  # one that is there when this is read again
                    with dbuffer.WeightReceiver(arguments[0]) as receiver:
                        arguments[1] = str(receiver.wait_for_version(timeout_s=0))
                if name not in NEED_AN_ENGINE:
                    # Without a terminal, a watched status is shown when it is stopped.
                    run_command(home, name, *(each for each in arguments if each != "--watch"))
    return namespace


def run_command(home: Path, name: str, *arguments: str) -> None:
    """Run a command to its end, or until it has shown that it works."""
    with Command(home, name, *arguments) as command:
        if name in RUN_UNTIL_STOPPED:
            assert command.line(0)
            command.signal(signal.SIGINT)
            assert command.wait() == -signal.SIGINT
        else:
            code, output, errors = command.communicate()
            assert code == 0, output + errors


# What is run.


@pytest.fixture
def home(shm_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's directory, with a checkpoint."""
    (shm_path / "checkpoint").mkdir()
    save_file({"weight": torch.ones(8)}, shm_path / "checkpoint" / "model.safetensors")
    monkeypatch.chdir(shm_path)
    return shm_path


@pytest.mark.parametrize(
    "page",
    sorted({b.page for b in blocks("python") + blocks("console")} - {TUTORIAL}),
    ids=relative,
)
def test_a_page_is_followed(page, home, request):
    """In one directory; in soaks again, as by a reader who goes through it a second time."""
    needs_bucket = BUCKET in page.read_text(encoding="utf-8")
    bucket = request.getfixturevalue("bucket_url") if needs_bucket else BUCKET
    with dbuffer.WeightSender(home / "shared" / "policy") as sender:  # on another host
        for _ in range(2 if is_soak() else 1):
            sender.send({"weight": torch.ones(8)})
            follow(page, home, bucket)


@IN_SOAKS_ALONE
@pytest.mark.slow
def test_the_collector_runs(tmp_path):
    (block,) = blocks("python", PROGRAM)
    script = tmp_path / "collector.py"
    script.write_text(block.code.replace("/dev/shm/run-1", str(tmp_path / "run")))
    subprocess.run([sys.executable, script], check=True, cwd=tmp_path)
    with dbuffer.WeightReceiver(tmp_path / "run" / "policy") as receiver:
        assert receiver.wait_for_version(timeout_s=0) == 5


@pytest.mark.parametrize("block", MARKED, ids=str)
def test_a_block_that_is_not_run_says_why(block):
    assert len(block.reason.split()) >= 3
    named = re.findall(r"tests/[\w/.]+", block.reason)
    for name in named:
        assert "def test_" in (ROOT / name).read_text(encoding="utf-8")
    if "shown by" in block.reason:
        assert named
    assert not blocks("bash") + blocks("yaml"), "these are not run at all"


# Commands.


def commands_in(code: str) -> list[list[str]]:
    code = code.replace("\\\n", " ")
    lines = [line[2:] for line in code.splitlines() if line.startswith("$ ")]
    lines = [re.sub(r" > \S+ 2>&1 &$", "", line) for line in lines]  # in the background
    return [shlex.split(line, comments=True) for line in lines]


def dbuffer_commands_in(code: str) -> list[list[str]]:
    return [command[1:] for command in commands_in(code) if command[0] == "dbuffer"]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "console"], ids=str)
def test_commands_are_understood(block):
    group = typer.main.get_command(app)
    tasks = runpy.run_path(str(ROOT / "dev.py"))["COMMANDS"]
    for command in commands_in(block.code):
        match command:
            case ["dbuffer", name, *arguments]:
                subcommand = group.get_command(None, name)  # type: ignore[attr-defined]
                subcommand.make_context(name, arguments)  # parsed, and not carried out
            case ["python3", "dev.py", task, *_]:
                assert task in tasks
            case _:
                assert block.mark == NOT_RUN or block.page == TUTORIAL, command


def test_the_tutorial_shows_its_programs():
    """Their commands and excerpts; tests/integrations/trl/test_tutorial.py runs them."""
    programs = {path.name: path for path in (ROOT / "examples" / "tutorial").glob("*.py")}
    texts = {name: path.read_text(encoding="utf-8") for name, path in programs.items()}
    for block in (b for b in blocks("python") if b.page == TUTORIAL):
        excerpt = textwrap.indent(block.code, "    ")
        assert any(excerpt in text for text in texts.values()), str(block)
    run = set()
    for block in (b for b in blocks("console") if b.page == TUTORIAL):
        for command in commands_in(block.code):
            for program in (word for word in command if word.endswith(".py")):
                run.add(Path(program).name)
                options = {word for word in command if word.startswith("--")}
                text = texts[Path(program).name]
                assert all(f'"{option}"' in text for option in options), command
    assert run == set(programs)


def test_the_readme_shows_every_command():
    shown = {name for b in blocks("console") for name, *_ in dbuffer_commands_in(b.code)}
    assert shown == set(COMMANDS)


# JSON.


def shape_of(value: Any) -> Any:
    """The keys of a JSON value, and of what it holds; metadata and values of any kind aside."""
    if isinstance(value, dict):
        return {k: None if k == "metadata" else shape_of(v) for k, v in value.items()}
    if isinstance(value, list):
        found = [shape_of(item) for item in value if isinstance(item, dict)]
        return found[:1]
    return None


def documented(command: str) -> Any:
    """The JSON block behind the paragraph that begins with a command."""
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    found = re.search(rf"^`{re.escape(command)}`[^`].*?^```json\n(.*?)^```", text, re.M | re.S)
    return shape_of(json.loads(found[1]))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(32, 32)}, path)
    return path


def test_json_has_the_documented_shape(tmp_path, checkpoint, capsys):
    store = str(tmp_path / "store")

    def printed(*arguments: str) -> Any:
        assert run([*arguments, "--json"]) == 0
        return shape_of(json.loads(capsys.readouterr().out))

    assert printed("publish", str(checkpoint), store) == documented("dbuffer publish --json")
    follow = ["follow", store, "--count", "1", "--receiver-id", "worker-0"]
    assert printed(*follow) == documented("dbuffer follow --json")
    assert printed("status", store) == documented("dbuffer status --json")
    assert printed("log", store) == documented("dbuffer log --json")
    assert printed("verify", store) == documented("dbuffer verify --json")
    for command in ("pin", "unpin"):
        assert printed(command, store, "1") == documented("dbuffer pin --json")
    assert printed("rollback", store, "1") == documented("dbuffer publish --json")
    assert printed("ls", store) == documented("dbuffer ls --json")
    against = ["ls", store, "--against", str(checkpoint)]
    assert printed(*against) == documented("dbuffer ls --against MODEL_DIR --json")
    assert printed("doctor", str(tmp_path)) == documented("dbuffer doctor --json")


@pytest.mark.timing(bucket_records_s=0.05)
def test_json_of_a_bucket_has_the_documented_shape(remote, local, bucket_url, capsys):
    weights = {"weight": torch.ones(64, 64)}

    def status() -> Any:
        assert run(["status", bucket_url, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    with (
        dbuffer.WeightSender(remote, delta=True) as sender,
        dbuffer.Mirror(remote, bucket_url, poll_interval_s=0.05).start() as up,
        dbuffer.Mirror(bucket_url, local, poll_interval_s=0.05).start() as down,
    ):
        for number in (1, 2):
            weights["weight"][0, 0] = number
            sender.send(weights)
            up.wait_until_current()
            down.wait_until_current()
        until("a mirror has put its records", lambda: status()["receivers"])
        seen = shape_of(status())
    assert seen.pop("writer") is None
    documented_of_store = documented("dbuffer status --json")
    documented_of_store.pop("writer")
    assert seen == documented_of_store


def test_json_of_what_runs_for_long_has_the_documented_fields():
    from dbuffer.integrations.engine.follower import Switch
    from dbuffer.publish.publication import Publication

    def names(kind: Any) -> set[str]:
        return {item.name for item in dataclasses.fields(kind)}

    assert documented("dbuffer follow-server --json").keys() == names(Switch)
    named = {"version", "run"}
    assert documented("dbuffer mirror --json").keys() == names(Publication) - {"id"} | named


def test_rules_of_the_names_page_are_read(tmp_path):
    (block,) = (b for b in blocks("json") if b.page.name == "names-and-lora.md")
    file = tmp_path / "names.json"
    file.write_text(block.code)
    weights = {"model.visual.norm": torch.ones(1), "a.qkv.weight": torch.ones(3)}
    renamed = dbuffer.NameMap.read(file).convert(weights)
    assert list(renamed) == ["visual.norm", "a.q.weight", "a.k.weight", "a.v.weight"]


# The format.


def test_layouts_of_the_design_page_are_layouts():
    whole, in_parts = (b for b in blocks("json") if b.page.name == "design.md")
    assert Layout.decode(whole.code.encode(), end=1 << 30).aliases
    assert Layout.decode(in_parts.code.encode(), end=1 << 30).is_in_parts


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        ("### Pointer:", records.Pointer),
        ("### Manifest", records.Manifest),
        ("### Writer", records.WriterRecord),
        ("### Receiver:", records.ReceiverRecord),
        ("### Pointer of a bucket", objects.BucketPointer),
        ("### Version in a bucket", objects.BucketVersion),
        ("### Receivers in a bucket", objects.BucketReceivers),
    ],
)
def test_the_design_page_names_every_field_of_a_record(heading, kind):
    text = (DOCS / "design.md").read_text(encoding="utf-8")
    section = text.split(heading)[1].split("\n#")[0]
    rows = re.findall(r"^\| (`.+?) \|", section, flags=re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(["format", *kind.__struct_fields__])


def test_the_plain_reader_reads_parts(shm_path, monkeypatch):
    read_newest = follow(DOCS / "design.md", shm_path)["read_newest"]

    remote, local = shm_path / "parts", shm_path / "mirrored"
    monkeypatch.setenv("DBUFFER_MOUNT", "network")
    with World(shm_path, 2) as world:
        world.run(publish_rows, remote)
    with dbuffer.Mirror(remote, local).start() as mirror:
        mirror.wait_until_current(timeout_s=60)
    assert len(list(remote.glob("*/*.r[01].td"))) == 2
    assert not list(local.glob("*/*.r*.td"))
    for store in (remote, local):  # in a mirror's file blocks are hashed by pieces still
        version, _, tensors = read_newest(store)
        assert version == 1
        assert torch.equal(tensors["rows"], ROWS)


ROWS = torch.arange(1_400_000.0).reshape(1400, 1000)


def publish_rows(rank: int, store: Path) -> None:
    """Each of two ranks has half of the rows, which end within a block of checksums."""
    rows = distribute_tensor(ROWS, init_device_mesh("cpu", (2,)), [Shard(0)])
    with dbuffer.ShardedWeightSender(store) as sender:
        sender.send({"rows": rows})


# Names, figures and links.


def test_the_errors_page_is_current():
    made = runpy.run_path(str(DOCS / "make_errors.py"))["errors_page"]()
    assert (DOCS / "errors.md").read_text(encoding="utf-8") == made, (
        "dbuffer/errors.py has changed: run python3 docs/make_errors.py"
    )


def test_every_error_is_in_the_table():
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \| (.*?) \|$", text, flags=re.MULTILINE)
    errors = {name for name in dbuffer.__all__ if name.endswith("Error")}
    assert {name for name, *_ in rows} == errors - {"DBufferError"}
    for name, kinds, happened, advice in rows:
        assert happened
        assert advice
        for kind in re.findall(r"`(\w+)`", kinds):
            base = getattr(dbuffer, kind, None) or __builtins__[kind]
            assert issubclass(getattr(dbuffer, name), base)


@pytest.fixture
def metric_names(tmp_path: Path) -> dict[str, set[str]]:
    """Names of each metric of the exporters in a query, by its documented name."""
    from prometheus_client import REGISTRY, CollectorRegistry

    from dbuffer.integrations import metrics
    from dbuffer.integrations.engine.reporting import FollowerReport

    FollowerReport().begin("documented")
    others = CollectorRegistry()
    metrics.register(dbuffer.Mirror(tmp_path / "remote", tmp_path / "local"), others)
    with dbuffer.WeightSender(tmp_path / "store") as sender:
        metrics.register(sender, others)
        families = [*REGISTRY.collect(), *others.collect()]
    parts = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    found = {}
    for family in (each for each in families if each.name.startswith("dbuffer_")):
        names = [family.name + part for part in parts.get(family.type, [""])]
        found[names[0].removesuffix("_bucket")] = set(names)
    return found


NOT_DRAWN = {"dbuffer_run", "dbuffer_sender_run", "dbuffer_sender_steps_back_total"}
"""Metrics that name something, or are of one moment."""


def test_every_metric_is_documented_and_on_the_dashboard(metric_names):
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    documented_names = re.findall(r"^\| `(dbuffer_\w+)` \|", text, flags=re.MULTILINE)
    assert set(documented_names) == set(metric_names)
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    shown = {name for query in queries for name in re.findall(r"dbuffer_\w+", query)}
    assert shown <= set().union(*metric_names.values())
    not_shown = {name for name, parts in metric_names.items() if not parts & shown}
    assert not_shown == NOT_DRAWN
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]}
    assert len(places) == len(board["panels"]), "two panels are at one place"


def test_prometheus_answered_each_query_of_the_dashboard():
    """In the tutorial's run (`python -m benchmarks.board`), whose panels are drawn."""
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    panels = {each["title"]: each for each in board["panels"] if each["type"] != "row"}
    del panels["Requests to buckets"]  # the tutorial has no bucket
    kept = json.loads(result("board.json"))["panels"]
    assert [panel["title"] for panel in kept] == list(panels)
    for panel in kept:
        targets = panels[panel["title"]]["targets"]
        assert panel["queries"] == [target["expr"] for target in targets]
        drawn = [series for series in panel["series"] if series["points"]]
        assert {series["query"] for series in drawn} == set(range(len(targets))), panel["title"]
        assert not [series["name"] for series in drawn if "{{" in series["name"]]


def test_every_option_of_an_engine_is_documented():
    from dbuffer.integrations.engine.engine_options import EngineOptions

    text = (DOCS / "integrations" / "vllm.md").read_text(encoding="utf-8")
    section = text.split("## Options")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", section, flags=re.MULTILINE)
    shown = {name: default.strip("`") for name, default in rows}
    assert (shown.pop("store"), shown.pop("pause")) == ("required", '"keep"')
    options = {item.name: item.default for item in dataclasses.fields(EngineOptions)}
    del options["store"], options["instance_id"]  # set by who follows
    assert {name: json.loads(default) for name, default in shown.items()} == options


@pytest.mark.parametrize(
    ("page", "name", "num_before"),
    [
        ("python.md", "WeightSender", 1),
        ("python.md", "WeightReceiver", 1),
        ("integrations/trl.md", "over_store", 2),
    ],
)
def test_every_argument_is_documented(page, name, num_before):
    """Of its arguments, those behind the first ones, which have no default."""
    from dbuffer.integrations.trl import over_store

    heading = rf"\n### .*`{name}`\n"
    section = re.split(heading, (DOCS / page).read_text(encoding="utf-8"))[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, flags=re.MULTILINE)
    made = over_store if name == "over_store" else getattr(dbuffer, name)
    arguments = [
        each
        for each in inspect.signature(made).parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    expected = {each.name: each.default for each in arguments[num_before:]}
    if name == "WeightSender":
        expected |= {each.name: each.default for each in dataclasses.fields(dbuffer.SenderOptions)}
    assert {name: ast.literal_eval(default) for name, default in rows} == expected


def test_the_lowest_versions_of_frameworks_are_those_of_the_extras():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = rows_of((DOCS / "installation.md").read_text(encoding="utf-8"))
    (needed,) = (row[1] for row in rows if row[0].startswith("vLLM, "))
    shown = re.findall(r"(\w+) ([\d.]+)", needed)
    assert len(shown) == 6
    for name, lowest in shown:
        extra = name.lower()
        assert f"{extra}>={lowest}" in extras["optional-dependencies"][extra]


def public_names() -> list[str]:
    """Names of `dbuffer` besides its errors, which have a page, and of the integrations."""
    names = [f"dbuffer.{name}" for name in dbuffer.__all__ if not name.endswith("Error")]
    names.remove("dbuffer.__version__")
    for package in pkgutil.iter_modules(integrations.__path__, "dbuffer.integrations."):
        module = importlib.import_module(package.name)
        names += [f"{package.name}.{name}" for name in getattr(module, "__all__", ())]
    return names


def test_every_public_name_is_in_the_reference_and_has_an_example():
    """The example is run, or says which test shows it."""
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\bdbuffer(?:\.\w+)+", text))
    assert {name for name in public_names() if name not in shown} == set()
    code = "\n".join(
        block.code
        for block in BLOCKS
        if block.language in ("python", "console")
        and (block.mark != NOT_RUN or re.search("shown .*by tests/", block.reason))
    )
    words = set(re.findall(r"\w+", code))
    assert {name for name in public_names() if name.rpartition(".")[2] not in words} == set()


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def result(name: str) -> str:
    return (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")


def between(text: str, since: str, until: str | None = None) -> str:
    """Return the part of a text after ``since``, up to ``until``."""
    return text.partition(until or "\0")[0].partition(since)[2]


def cell(results: str, name: str, column: int, since: str = "\n") -> str:
    """Return a cell of the first row with figures, after ``since``, of a name or a pattern."""
    rows = rows_of(between(result(results), since))
    return next(r for r in rows if fnmatch.fnmatchcase(r[0], name) and len(r) > 2)[column]


@pytest.mark.parametrize(
    ("page", "results", "since", "until"),
    [
        ("benchmarks.md", "cpu.txt", "# Benchmarks", "## The pause"),
        ("benchmarks.md", "pause.txt", "## The pause", "## Ranks on a network mount"),
        ("benchmarks.md", "ranks.txt", "## Ranks on a network mount", "## Inter-token latency"),
        ("benchmarks.md", "latency.txt", "## Inter-token latency", "## From publish to served"),
        ("benchmarks.md", "served.txt", "## From publish to served", "## A step of TRL's trainer"),
        ("benchmarks.md", "trl.txt", "## A step of TRL's trainer", "## GPUs"),
        ("benchmarks.md", "gpu.txt", "## GPUs", "## An engine on a GPU"),
        ("benchmarks.md", "gpu-engine.txt", "## An engine on a GPU", "## Deltas"),
        ("sharded-trainers.md", "sharded.txt", "# ", None),
        ("object-storage.md", "objects.txt", "## Speed", "## Troubleshooting"),
        ("across-nodes.md", "fleet.txt", "## A fleet", "¹ If"),
    ],
)
def test_figures_are_those_of_the_results(page, results, since, until):
    text = between((DOCS / page).read_text(encoding="utf-8"), since, until)
    shown = [row for row in rows_of(text) if re.search(r"\d\.\d", "".join(row))]
    rows = rows_of(result(results))
    if results == "fleet.txt":  # whose way and fleet are two columns, and on the page one
        shown, rows = [row[1:] for row in shown], [row[2:] for row in rows]
    assert shown
    for row in shown:
        assert [re.sub(r"missed.", "FAIL", cell.replace("`", "")) for cell in row] in rows


def test_torchrls_figures_are_those_of_the_results():
    rows = []
    for table in result("torchrl.txt").split("\n\n"):
        by_name = {name: cells for name, *cells in rows_of(table)}
        if (ratios := by_name.get("TorchRL / dbuffer")) is not None:
            found = zip(by_name["dbuffer"], by_name["TorchRL"], ratios, strict=True)
            rows += [[f"{float(a):.0f} ms", f"{float(b):.0f} ms", c] for a, b, c in found if c]
    text = (DOCS / "integrations" / "torchrl.md").read_text(encoding="utf-8")
    section = between(text, "## Performance").partition("\n## ")[0]
    shown = [row[1:] for row in rows_of(section) if row[1].endswith(" ms")]
    assert len(shown) == 6
    for row in shown:
        assert row in rows
    reads, kills = torn_reads(), killed_writers()
    torn = [", ".join(each) for each in zip(reads["torn"], reads["failed"], strict=True)]
    counts = [reads["reads"], torn, kills["killed"], whole_after(kills), kills["a mix"]]
    assert [row[1:3] for row in rows_of(section)[-6:]] == [*counts, kills["unreadable"]]


def columns_of(text: str) -> dict[str, list[str]]:
    """Return the columns of a table, by title."""
    titles, _, *rows = rows_of(text)
    return {title: list(cells) for title, *cells in zip(titles, *rows, strict=True)}


def torn_reads() -> dict[str, list[str]]:
    """Return columns with a cell of dbuffer, and one of TorchRL."""
    return columns_of(between(result("torchrl.txt"), "One process writes", "A writer is killed"))


def killed_writers() -> dict[str, list[str]]:
    return columns_of(between(result("torchrl.txt"), "A writer is killed", "\nTargets"))


def whole_after(kills: dict[str, list[str]]) -> list[str]:
    """Return after how many kills each had a whole version."""
    either = zip(kills["the version before"], kills["the new version"], strict=True)
    return [str(int(old) + int(new)) for old, new in either]


def lost_tokens(pause: str) -> str:
    """Return the share of tokens per second that a version a second costs."""
    ours, without = (
        float(cell("served.txt", name, 2, f"16 streams, {pause}"))
        for name in ("dbuffer", "no new weights")
    )
    return f"{1 - ours / without:.0%}"


def by_way(pauses: str, column: str) -> dict[str, str]:
    """Return a column of one engine's table in the results of pauses, by the way."""
    columns = columns_of(pauses.partition("| median ms")[0])
    return dict(zip(columns[""], columns[column], strict=True))


def stated_figures() -> Iterator[tuple[str, str]]:
    """Yield phrases with figures of the results, each with its page."""
    (live,) = (e for e in result("pause.txt").split("\n\nQwen") if "live parameters\n" in e)
    pauses = by_way(live, "pause ms")
    ours, memcpy = pauses["dbuffer"], pauses["memcpy of the same bytes"]
    disk, kills = pauses["vLLM, from safetensors"], killed_writers()
    whole = whole_after(kills)
    recomputing, in_place = map(lost_tokens, ("keep", "in_place"))
    yield "tuning.md", f"[{in_place} of the tokens in place of {recomputing}]"
    for phrase in (
        f"takes {ours} ms, memcpy {memcpy} ms, vLLM's own reload from memory "
        f"{pauses['vLLM, from memory (the floor)']} ms",
        f"[{recomputing} of the tokens](docs/benchmarks.md#from-publish-to-served), or {in_place} ",
        f"killed {kills['killed'][0]} times in mid-write: {whole[0]} times a whole version "
        f"could be read; with TorchRL's double buffer {whole[1]} times",
        f"takes {cell('delta.txt', 'bytes of a publish on a network mount, *', 2)} of the model's "
        f"bytes as a [delta](docs/deltas.md); "
        f"{cell('delta.txt', 'mean over 60 such publishes, *', 2)} on average",
    ):
        yield "README.md", phrase

    def gpu(name: str, column: int) -> str:
        return cell("gpu.txt", name, column, "15.72 GB in 290")

    on_gpu = by_way(between(result("gpu-engine.txt"), "on the GPU\n"), "pause ms")
    copy_ms = on_gpu["memcpy of the same bytes"]
    ratio = float(on_gpu["dbuffer"]) / float(copy_ms)
    yield "README.md", f"{on_gpu['dbuffer']} ms on an NVIDIA H200, where a copy takes {copy_ms}"
    cpu = functools.partial(cell, "cpu.txt")
    torchrl = functools.partial(cell, "torchrl.txt")
    for phrase in (
        f"{float(disk) / float(ours):.1f} times dbuffer's for 1 GB",
        f"with live layers takes {float(ours) / float(memcpy):.2f} times as long as a memcpy",
        f"{cpu('TorchRL', 2)} and {torchrl('TorchRL', 2)} GB/s on two machines",
        f"safetensors at {cpu('safetensors', 2)} GB/s in memory",
        f"{cpu('dbuffer', 2)} GB/s, {cpu('dbuffer', 3)} of memcpy on 2 cores",
        f"{gpu('publish', 3)} of a GPU's link, {float(gpu('publish', 2)):.0f} GB/s",
        f"staged at {gpu('stage', 3)} of a host's memcpy, {float(gpu('stage', 2)):.0f} GB/s",
        f"at {gpu('commit', 3)} of the link, {float(gpu('commit', 2)):.0f} GB/s",
        f"paused for {on_gpu['dbuffer']} ms, {ratio:.2f} of that copy of its 0.99 GB",
    ):
        yield "choosing.md", phrase
    of_changes = {name: float(gpu(f"{name}, 1 % changed", 1)) for name in ("publish", "commit")}
    assert round(of_changes["publish"] / float(gpu("publish", 1))) == 6
    assert round(float(gpu("commit", 1)) / of_changes["commit"]) == 17
    memory = [row for row in rows_of(result("pause.txt")) if row[0] == "memory to stage a version"]
    packed, live_mb, experts = (float(row[2]) for row in memory)
    few, half = (
        float(cell("delta.txt", f"bytes a changed element, {share} changed", 2))
        for share in ("0.5%", "47.1%")
    )
    (newest,) = (row[2] for row in rows_of(result("cpu.txt")) if "15 x TorchRL" in row[1])
    sender_mb = float(cpu("extra memory in the sender", 2))
    extra_mb = cell("sharded.txt", "extra memory of the rank that takes most", 2)
    slower = float(torchrl("TorchRL", 1)) / float(torchrl("dbuffer", 1))
    yield from (
        (
            "tuning.md",
            f"[{cpu('dbuffer', 3)} of memcpy's speed, with checksums "
            f"{cpu('dbuffer, checksums', 3)}]",
        ),
        ("tuning.md", "[six times](benchmarks.md#gpus) a publish"),
        ("tuning.md", "a seventeenth of the pause [with a GPU]"),
        ("tuning.md", f"[{live_mb:.0f} MB measured](benchmarks.md#the-pause)"),
        ("tuning.md", f"[{sender_mb:.1f} MB measured](benchmarks.md#targets)"),
        ("integrations/vllm-switch.md", f"{packed / 1000:.1f} GB beside a model of 0.99 GB"),
        ("integrations/vllm-switch.md", f"{experts / 1000:.1f} GB beside 1.09 GB of experts"),
        ("sharded-trainers.md", f"took more than {extra_mb} MB of memory"),
        (
            "deltas.md",
            f"{few:.1f} bytes per element where 0.5 % changed, {half:.1f} where half did",
        ),
        ("integrations/torchrl.md", f"{slower:.2f} here"),
        ("integrations/torchrl.md", f"and {newest} in [two other"),
        ("object-storage.md", PRICES),
    )
    fleet, deltas = result("fleet.txt"), result("delta.txt")
    (speed,) = re.findall(r"found at ([\d.]+) GB/s", fleet)
    tree = "*tree of mirrors, 32 each, a delta"
    encode, all_have = (cell("fleet.txt", tree, column) for column in (1, 2))
    least, most, seconds = re.findall(r"\d+\.\d+", fleet.rpartition("a mirror read ")[2])
    yield "across-nodes.md", f"encodes for {encode} ({speed} GB/s"
    yield "across-nodes.md", f"Of the {all_have}, one trainer process"
    yield "across-nodes.md", f"read {least} to {most} times its bytes"
    yield "across-nodes.md", f"the last mirror had 21 MB {seconds} s after"
    ((full, changed, copy),) = re.findall(
        r": ([\d.]+) ms for a whole version, ([\d.]+) ms .*, ([\d.]+) ms for", deltas
    )
    (alone,) = re.findall(r"known places, and no more: ([\d.]+)", deltas)
    yield "benchmarks.md", f"{changed} ms and {full} ms; memcpy {copy} ms"
    yield "benchmarks.md", f"writing them alone takes {alone} of it"


def test_figures_in_the_text_of_pages_are_those_of_the_results():
    assert PRICES in result("objects.txt")
    for page, phrase in stated_figures():
        path = README if page == README.name else DOCS / page
        text = " ".join(path.read_text(encoding="utf-8").split())
        # Pages have a space before the percent sign.
        assert re.sub(r"(?<=\d)%", " %", phrase) in text, (page, phrase)


def test_figures_of_deltas_are_those_of_the_results():
    text = between((DOCS / "benchmarks.md").read_text(encoding="utf-8"), "## Deltas")
    results = result("delta.txt")
    rows = rows_of(results)
    of_bytes = [row[2] for row in rows if row[0].startswith("bytes a changed")]
    assert next(row for row in rows_of(text) if not row[0])[1:] == of_bytes
    tables = [part for part in results.split("\n\n") if "| of memcpy's time |" in part]
    shares = [[row[2] for row in rows_of(table)[3:]] for table in tables]  # below memcpy's own row
    assert [row[1:] for row in rows_of(text) if row[0][:4] in ("0.61", "1.09")] == shares
    targets = {row[0]: (row[2], row[3]) for row in rows_of(text) if len(row) == 4}
    for name, of in (
        ("find + encode", "find and encode, 290 / 18,867 tensors"),
        ("decode + apply", "decode and apply"),
    ):
        shown, limits = targets[of]
        for column, figures in ((2, shown.removesuffix(", missed")), (3, limits)):
            kinds = [cell("delta.txt", f"{name}, {k}*", column) for k in ("dense", "experts")]
            assert list(dict.fromkeys(kinds)) == figures.split(" / ")
    of_target = {row[0].partition(",")[0]: row[2] for row in rows if len(row) > 3}
    for name, (shown, _) in targets.items():
        if (figure := of_target.get(name.partition(",")[0])) and "bytes of a delta" not in name:
            assert shown.startswith(figure.replace("%", " %")), name


def test_outputs_of_figures_are_kept() -> None:
    pages = [p for p in PAGES if re.search(r"not\s+kept", p.read_text(encoding="utf-8"))]
    assert pages == []
    page = (DOCS / "guarantees.md").read_text(encoding="utf-8").partition("## Soak results")[2]
    rows = " ".join(" ".join(row) for row in rows_of(page.partition("## ")[0]))
    shown = re.findall(r"\d[\d,]*", rows)
    kept = re.findall(r"^([\d,]+) (?!passed)[a-z]", result("soak.txt"), re.MULTILINE)
    assert sorted(shown) == sorted(kept) != []


def slug(heading: str) -> str:
    """The anchor that GitHub and MyST give a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.lower().replace("`", ""))
    return kept.strip().replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_and_names_of_programs_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), link
    for name in re.findall(r"python3? -m ((?:dbuffer|benchmarks)[\w.]*)", text):
        path = ROOT.joinpath(*name.rstrip(".").split("."))
        assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
    for name in re.findall(r"examples/\w+\.py", text):
        assert (ROOT / name).is_file(), name


def test_tests_of_interfaces_exist():
    """Each item of another project's interface has one, unless it is not provided."""
    rows = rows_of((DOCS / "integrations" / "interfaces.md").read_text(encoding="utf-8"))
    items = [row for row in rows if row[0] not in ("item", "---")]
    assert len(items) > 50
    for item, test in items:
        if test != "none: not provided":
            file, _, name = test.strip("`").partition("::")
            source = (ROOT / "tests" / "integrations" / file).read_text(encoding="utf-8")
            assert f"\ndef {name}(" in source, item


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 150


# The site.


def build(source: Path, target: Path) -> tuple[int, str]:
    """Build a site as `python3 dev.py docs` does; the exit status, and the warnings."""
    _, *options = runpy.run_path(str(ROOT / "dev.py"))["COMMANDS"]["docs"]
    options = [option for option in options if option.startswith("-")]
    warnings = target.with_suffix(".warnings")
    arguments = [*options, "-q", "-w", str(warnings), str(source), str(target)]
    with Child(run_sphinx, arguments) as child:
        code = child.wait()
    return code, warnings.read_text(encoding="utf-8")


def run_sphinx(_: Connection, arguments: list[str]) -> None:
    from sphinx.cmd.build import main

    # What was imported before this process was forked would not be mocked.
    mocked = runpy.run_path(str(DOCS / "conf.py"))["autodoc_mock_imports"]
    for name in list(sys.modules):
        if name.partition(".")[0] in mocked or name.startswith("dbuffer.integrations."):
            del sys.modules[name]

    sys.exit(main(arguments))


def test_links_of_root_pages_lead_somewhere_on_the_site(monkeypatch):
    # Else what the site mocks would be mocked in all tests that import it for the first time.
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    conf = runpy.run_path(str(DOCS / "conf.py"))
    app = SimpleNamespace(env=Mock())
    for page, file in conf["ROOT_PAGES"].items():
        source = [""]
        conf["read_root_page"](app, page, source)
        targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", source[0])
        assert targets
        assert [target for target in targets if not (DOCS / target).exists()] == [], file


@IN_SOAKS_ALONE
def test_the_site_builds_without_a_warning(tmp_path):
    assert build(DOCS, tmp_path / "site") == (0, "")
    assert "Six guarantees" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert "receivers. Default: one from what" in reference
    assert ">Type<" not in reference  # words of a docstring, taken for an attribute's type
