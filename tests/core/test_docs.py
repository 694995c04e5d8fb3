"""README and docs/: what they show is run, what they name exists, and the site builds."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import tomllib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

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
from tests.support.soak import in_soaks_alone
from tests.support.waiting import until
from tests.support.worlds import World

MARKED = [block for block in BLOCKS if block.mark == NOT_RUN]


RUN_UNTIL_STOPPED = ("follow", "exec", "mirror")
TAKE_A_VERSION = ("pin", "unpin", "rollback")
NEED_AN_ENGINE = ("demo", "follow-server")


BUCKET = "s3://my-bucket/policy"
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
def test_a_page_is_followed_and_followed_again(page, home, request):
    """In one directory, as by a reader who goes through it a second time."""
    needs_bucket = BUCKET in page.read_text(encoding="utf-8")
    bucket = request.getfixturevalue("bucket_url") if needs_bucket else BUCKET
    with dbuffer.WeightSender(home / "shared" / "policy") as sender:  # on another host
        for _ in range(2):
            sender.send({"weight": torch.ones(8)})
            follow(page, home, bucket)


@in_soaks_alone
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


def test_bash_and_yaml_are_marked():
    assert not blocks("bash")
    assert not blocks("yaml")


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


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_modules_that_are_run_exist(page):
    for name in re.findall(r"python3? -m ([\w.]+)", page.read_text(encoding="utf-8")):
        if name.startswith(("dbuffer", "benchmarks")):
            path = ROOT.joinpath(*name.rstrip(".").split("."))
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), name
    for name in re.findall(r"examples/\w+\.py", page.read_text(encoding="utf-8")):
        assert (ROOT / name).is_file(), name


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
        assert shape_of(status()) == documented("dbuffer status s3://BUCKET/PREFIX --json")


def test_json_of_what_runs_for_long_has_the_documented_fields():
    from dbuffer.integrations.engine.follower import Switch
    from dbuffer.publish.publication import Publication
    from dbuffer.tools.doctor.peer import Meeting

    def names(kind: Any) -> set[str]:
        return {item.name for item in dataclasses.fields(kind)}

    assert documented("dbuffer follow-server --json").keys() == names(Switch)
    assert documented("dbuffer mirror --json").keys() == names(Publication)
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    for name in names(Meeting) | {"host", "pid", "num_seen"}:
        assert f"`{name}`" in text


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
    assert sorted(named) == sorted(["format", *(item.name for item in dataclasses.fields(kind))])


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


def test_every_metric_is_documented(metric_names):
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    documented_names = re.findall(r"^\| `(dbuffer_\w+)` \|", text, flags=re.MULTILINE)
    assert set(documented_names) == set(metric_names)


def test_the_dashboard_shows_each_metric(metric_names):
    board = json.loads((DOCS / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    shown = {name for query in queries for name in re.findall(r"dbuffer_\w+", query)}
    assert shown <= set().union(*metric_names.values())
    assert [name for name, parts in metric_names.items() if not parts & shown] == []
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


@pytest.mark.parametrize("made", [dbuffer.WeightSender, dbuffer.WeightReceiver])
def test_every_argument_of_senders_and_receivers_is_documented(made):
    text = (DOCS / "python.md").read_text(encoding="utf-8")
    section = text.split(f"### `{made.__name__}`")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, flags=re.MULTILINE)
    arguments = list(inspect.signature(made).parameters.values())[1:]  # after the store
    assert {name: ast.literal_eval(default) for name, default in rows} == {
        each.name: each.default for each in arguments
    }


def test_every_option_of_trls_trainers_is_documented():
    from dbuffer.integrations.trl import over_store

    text = (DOCS / "integrations" / "trl.md").read_text(encoding="utf-8")
    section = text.split("### Options of `over_store`")[1].split("\n#")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", section, flags=re.MULTILINE)
    options = list(inspect.signature(over_store).parameters.values())[2:]
    assert {name: ast.literal_eval(default) for name, default in rows} == {
        option.name: option.default for option in options
    }


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


def test_every_public_name_is_in_the_reference():
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\bdbuffer(?:\.\w+)+", text))
    assert {name for name in public_names() if name not in shown} == set()


def test_every_public_name_has_an_example():
    """The example is run, or says which test shows it."""
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


@pytest.mark.parametrize(
    ("page", "results", "since", "until"),
    [
        ("benchmarks.md", "cpu.txt", "# Benchmarks", "## The pause"),
        ("benchmarks.md", "pause.txt", "## The pause", "## Ranks on a network mount"),
        ("benchmarks.md", "ranks.txt", "## Ranks on a network mount", "## Inter-token latency"),
        ("benchmarks.md", "latency.txt", "## Inter-token latency", "## From publish to served"),
        ("benchmarks.md", "served.txt", "## From publish to served", "## A step of TRL's trainer"),
        ("benchmarks.md", "trl.txt", "## A step of TRL's trainer", "## GPUs"),
        ("benchmarks.md", "gpu.txt", "## GPUs", "## Deltas"),
        ("sharded-trainers.md", "sharded.txt", "# ", None),
        ("object-storage.md", "objects.txt", "## Speed", "## Troubleshooting"),
    ],
)
def test_figures_are_those_of_the_results(page, results, since, until):
    text = (DOCS / page).read_text(encoding="utf-8").partition(until or "\0")[0]
    text = text.partition(since)[2]
    shown = [row for row in rows_of(text) if re.search(r"\d\.\d", "".join(row))]
    measured = rows_of(result(results))
    assert shown
    for row in shown:
        assert [re.sub(r"missed.", "FAIL", cell.replace("`", "")) for cell in row] in measured


def test_torchrls_figures_are_those_of_the_results():
    measured = []
    for table in result("torchrl.txt").split("\n\n"):
        rows = {name: cells for name, *cells in rows_of(table)}
        if (ratios := rows.get("TorchRL / dbuffer")) is not None:
            found = zip(rows["dbuffer"], rows["TorchRL"], ratios, strict=True)
            measured += [[f"{float(a):.0f} ms", f"{float(b):.0f} ms", c] for a, b, c in found if c]
    text = (DOCS / "integrations" / "torchrl.md").read_text(encoding="utf-8")
    section = text.partition("## Performance")[2].partition("\n## ")[0]
    shown = [row[1:] for row in rows_of(section) if row[1].endswith(" ms")]
    assert len(shown) == 6
    for row in shown:
        assert row in measured

    def counts(since: str, until: str) -> dict[str, list[str]]:
        """Columns of a table of the result, of both ways."""
        titles, _, *rows = rows_of(result("torchrl.txt").partition(since)[2].partition(until)[0])
        return {title: list(cells) for title, *cells in zip(titles, *rows, strict=True)}

    reads = counts("One process writes", "A writer is killed")
    kills = counts("A writer is killed", "\nTargets")
    whole = [
        str(int(old) + int(new))
        for old, new in zip(kills["the version before"], kills["the new version"], strict=True)
    ]
    torn = [", ".join(each) for each in zip(reads["torn"], reads["failed"], strict=True)]
    expected = [reads["reads"], torn, kills["killed"], whole, kills["a mix"], kills["unreadable"]]
    assert [row[1:3] for row in rows_of(section)[-6:]] == expected


def test_costs_are_computed_with_the_prices_that_are_shown():
    text = " ".join((DOCS / "object-storage.md").read_text(encoding="utf-8").split())
    results = (ROOT / "benchmarks" / "results" / "objects.txt").read_text(encoding="utf-8")
    assert PRICES in text
    assert PRICES in results


def test_the_fleets_figures_are_those_of_the_results():
    page = (DOCS / "across-nodes.md").read_text(encoding="utf-8")
    results = result("fleet.txt")
    shown = rows_of(page.partition("## A fleet")[2].partition("¹ If")[0])[2:]
    measured = [row[2:] for row in rows_of(results)]
    assert shown
    for row in shown:
        assert row[1:] in measured
    speed = re.search(r"found at ([\d.]+) GB/s", results)
    assert speed is not None
    tree = "tree of mirrors, 32 each, a delta"
    (delta,) = (row for row in rows_of(results) if row[0].endswith(tree))
    assert f"encodes for {delta[1]} ({speed[1]} GB/s" in " ".join(page.split())
    assert f"Of the {delta[2]}, one trainer process" in " ".join(page.split())
    real = results.rpartition("a mirror read ")[2]
    least, most, seconds = re.findall(r"\d+\.\d+", real)
    assert f"read {least} to {most} times its bytes" in page
    assert f"the last mirror had 21 MB {seconds} s after" in page


def first_screen() -> list[list[str]]:
    """Rows of the README's table of figures."""
    lead = README.read_text(encoding="utf-8").partition("## Quickstart")[0]
    return rows_of(lead)[2:]


def live_pauses() -> dict[str, dict[str, str]]:
    """Rows of the pauses of an engine with live parameters, by what it is done with."""
    (engine,) = (e for e in result("pause.txt").split("\n\nQwen") if "live parameters\n" in e)
    titles, _, *rows = rows_of(engine.partition("| median ms")[0])
    return {row[0]: dict(zip(titles, row, strict=True)) for row in rows}


def test_the_first_screen_has_the_measured_pause():
    ways = live_pauses()
    ours, memcpy, floor = (
        ways[way]["pause ms"]
        for way in ("dbuffer", "memcpy of the same bytes", "vLLM, from memory (the floor)")
    )
    _, shown, beside = next(row for row in first_screen() if "pause" in row[0])
    assert shown == f"{ours} ms"
    assert f"memcpy of the same bytes {memcpy} ms" in beside
    assert f"reload from memory {floor} ms" in beside
    total_ms = float(ways["dbuffer"]["total ms"])
    lead = " ".join(README.read_text("utf-8").split())
    assert f"to the end of the switch it took {total_ms:.0f} ms" in lead

    def tokens_of(name: str, columns: int, way: str) -> float:
        rows = (row for row in rows_of(result(name)) if row[0] == way and len(row) == columns)
        return float(next(rows)[2])

    for name, columns, when in (
        ("latency.txt", 8, "with a version 2 s after each switch"),
        ("served.txt", 4, "with one every second"),
    ):
        without, ours = (tokens_of(name, columns, way) for way in ("no new weights", "dbuffer"))
        assert f"[{1 - ours / without:.0%} {when}]".replace("%", " %") in lead
    columns = ("latency.txt", 8)
    without, theirs = (
        tokens_of(*columns, way) for way in ("no new weights", "vLLM, from safetensors")
    )
    assert f"vLLM's own reload cost {1 - theirs / without:.0%}".replace("%", " %") in lead


def test_the_page_on_transports_has_the_measured_figures():
    ways = live_pauses()
    ours, memcpy, disk = (
        float(ways[way]["pause ms"])
        for way in ("dbuffer", "memcpy of the same bytes", "vLLM, from safetensors")
    )

    def first(name: str, results: str) -> list[str]:
        rows = (row for row in rows_of(result(results)) if len(row) > 2)  # not the machine's
        return next(row for row in rows if row[0] == name)

    _, _, speed, share, *_ = first("dbuffer", "cpu.txt")
    of_torchrl = [first("TorchRL", name)[2] for name in ("cpu.txt", "torchrl.txt")]
    large = result("gpu.txt").partition("9.72 GB")[2]
    gpu, stage, commit = (
        next(row for row in rows_of(large) if row[0] == name)
        for name in ("publish", "stage", "commit")
    )
    text = " ".join((DOCS / "which-transport.md").read_text(encoding="utf-8").split())
    for phrase in (
        f"{disk / ours:.1f} times dbuffer's for 1 GB",
        f"with live layers takes {ours / memcpy:.2f} times as long as a memcpy",
        f"{of_torchrl[0]} and {of_torchrl[1]} GB/s on two machines",
        f"safetensors at {first('safetensors', 'cpu.txt')[2]} GB/s in memory",
        f"{speed} GB/s, {share} of memcpy on 2 cores",
        f"{gpu[3]} of a GPU's link, {float(gpu[2]):.0f} GB/s",
        f"staged at {stage[3]} of a host's memcpy, {float(stage[2]):.0f} GB/s",
        f"at {commit[3]} of the link, {float(commit[2]):.0f} GB/s",
    ):
        assert phrase in text, phrase


def test_the_first_screen_has_the_counted_kills():
    text = result("torchrl.txt").partition("killed in mid-write")[2].partition("\nTargets")[0]
    titles, _, *rows = rows_of(text)
    ours, peer = (dict(zip(titles, row, strict=True)) for row in rows)
    whole = [int(way["the version before"]) + int(way["the new version"]) for way in (ours, peer)]
    what, shown, beside = next(row for row in first_screen() if "killed" in row[0])
    assert what == f"trainer killed {ours['killed']} times in mid-write"
    assert shown.startswith(f"{whole[0]} times")
    assert f"{whole[1]} times; {peer['a mix']} times it loads a mix" in beside


def test_the_first_screen_has_the_counted_bytes_of_a_delta():
    share, mean = (
        next(row[2] for row in rows_of(result("delta.txt")) if row[0].startswith(name))
        for name in (
            "bytes of a publish on a network mount, 1 % changed",
            "mean over 60 such publishes, anchors included",
        )
    )
    _, shown, _ = next(row for row in first_screen() if "bytes" in row[0])
    assert shown == f"{share} of the model; {mean} on average, with anchors".replace("%", " %")


def test_the_bytes_of_deltas_are_those_of_the_results():
    measured = [
        row[2] for row in rows_of(result("delta.txt")) if row[0].startswith("bytes a changed")
    ]
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8").partition("## Deltas")[2]
    assert next(row for row in rows_of(text) if not row[0])[1:] == measured


def test_the_times_of_deltas_are_those_of_the_results():
    text = (DOCS / "benchmarks.md").read_text(encoding="utf-8").partition("## Deltas")[2]
    results = result("delta.txt")
    tables = [part for part in results.split("\n\n") if "| of memcpy's time |" in part]
    shares = [[row[2] for row in rows_of(table)[3:]] for table in tables]  # below memcpy's own row
    assert [row[1:] for row in rows_of(text) if row[0][:4] in ("0.61", "1.09")] == shares

    measured = {row[0].partition(",")[0]: row[2] for row in rows_of(results) if len(row) > 3}
    targets = [row for row in rows_of(text) if len(row) == 4]
    shown = {row[0]: row[2] for row in targets}
    limits = {row[0]: row[3] for row in targets}
    for kind, place in (("dense", 0), ("experts", 1)):
        for name, of in (
            ("find + encode", "find and encode, 290 / 18,867 tensors"),
            ("decode + apply", "decode and apply"),
        ):
            (row,) = (r for r in rows_of(results) if r[0].startswith(f"{name}, {kind}"))
            assert shown[of].removesuffix(", missed").split(" / ")[place] == row[2]
            assert row[3] in limits[of].split(" / ")
    for name, cell in shown.items():
        if (figure := measured.get(name.partition(",")[0])) and "bytes of a delta" not in name:
            assert cell.startswith(figure.replace("%", " %")), name
    pauses = re.search(
        r": ([\d.]+) ms for a whole version, ([\d.]+) ms .*, ([\d.]+) ms for", results
    )
    whole, delta, memcpy = pauses.groups()
    assert f"{delta} ms and {whole} ms; memcpy {memcpy} ms" in text
    alone = re.search(r"known places, and no more: ([\d.]+)", results)
    assert f"writing them alone takes {alone[1]} of it" in " ".join(text.split())


def test_the_memory_of_engines_is_that_of_the_results():
    rows = [row for row in rows_of(result("pause.txt")) if row[0] == "memory to stage a version"]
    packed, live, experts = (float(row[2]) for row in rows)
    guide = " ".join((DOCS / "integrations" / "vllm.md").read_text(encoding="utf-8").split())
    assert f"was {packed / 1000:.1f} GB beside a model of 0.99 GB" in guide
    assert f"{experts / 1000:.1f} GB beside 1.09 GB of experts" in guide
    tuning = (DOCS / "tuning.md").read_text(encoding="utf-8")
    assert f"[{live:.0f} MB measured](benchmarks.md#the-pause)" in tuning
    (sender,) = (r for r in rows_of(result("cpu.txt")) if r[0] == "extra memory in the sender")
    assert f"[{float(sender[2]):.1f} MB measured](benchmarks.md#targets)" in tuning


def test_figures_in_the_text_of_pages_are_those_of_the_results():
    def cells(name: str, row: str, since: str = "") -> list[str]:
        """The first such row with figures, after ``since``."""
        rows = rows_of(result(name).partition(since)[2] if since else result(name))
        return next(each for each in rows if each[0] == row and len(each) > 2)

    plain, checked = (cells("cpu.txt", row)[3] for row in ("dbuffer", "dbuffer, checksums"))
    publish, delta, commit, commit_delta = (
        float(cells("gpu.txt", row, "9.72 GB in 290")[1])
        for row in ("publish", "publish, 1 % changed", "commit", "commit, 1 % changed")
    )
    assert (round(delta / publish), round(commit / commit_delta)) == (9, 11)  # nine; below a tenth
    most = cells("sharded.txt", "extra memory of the rank that takes most")[2]
    few, half = (
        float(cells("delta.txt", f"bytes a changed element, {share} changed")[2])
        for share in ("0.5%", "47.1%")
    )
    ours, theirs = (float(cells("torchrl.txt", way)[1]) for way in ("dbuffer", "TorchRL"))
    (newest,) = (row[2] for row in rows_of(result("cpu.txt")) if "15 x TorchRL" in row[1])
    for page, phrase in (
        ("tuning.md", f"[{plain} of memcpy's speed, with checksums {checked}]"),
        ("tuning.md", "[nine times](benchmarks.md#gpus) a publish"),
        ("tuning.md", "a tenth of the pause [with a GPU]"),
        ("sharded-trainers.md", f"took more than {most} MB of memory"),
        (
            "deltas.md",
            f"{few:.1f} bytes per element where 0.5 % changed, {half:.1f} where half did",
        ),
        ("integrations/torchrl.md", f"{theirs / ours:.2f} here"),
        ("integrations/torchrl.md", f"and {newest} in [two other"),
    ):
        text = " ".join((DOCS / page).read_text(encoding="utf-8").split())
        assert phrase in text, phrase


def test_outputs_of_figures_are_kept() -> None:
    pages = [p for p in PAGES if re.search(r"not\s+kept", p.read_text(encoding="utf-8"))]
    assert pages == []


def test_the_counts_of_soaks_are_those_of_the_results() -> None:
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
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), link


def test_the_readme_is_short():
    assert len(README.read_text(encoding="utf-8").splitlines()) <= 200


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


def test_the_site_builds_without_a_warning(tmp_path):
    assert build(DOCS, tmp_path / "site") == (0, "")
    assert "Six guarantees" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert "receivers. Default: one from what" in reference
    assert ">Type<" not in reference  # words of a docstring, taken for an attribute's type


def test_a_broken_link_fails_the_build(tmp_path):
    docs = tmp_path / "docs"
    docs.mkdir()
    shutil.copy(DOCS / "conf.py", docs)
    shutil.copytree(DOCS / "static", docs / "static")
    (docs / "index.md").touch()
    broken = "[a page](docs/nowhere.md) and [a section](#no-such-section)"
    (tmp_path / "README.md").write_text(f"# A title\n\n{broken}\n")
    code, warnings = build(docs, tmp_path / "site")
    assert code != 0
    assert "nowhere" in warnings
    assert "no-such-section" in warnings
