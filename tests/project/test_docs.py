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
from dbuffer import integrations
from dbuffer.format import manifest as records
from dbuffer.format import objects
from dbuffer.format.layout import Layout
from dbuffer.testing.waiting import until
from dbuffer.tools.cli import COMMANDS, app, run
from tests.support import NEEDS_ALL, ROOT
from tests.support.answers import answering, ready, weights_of
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
from tests.support.worlds import World

INTEGRATIONS = ROOT / "tests" / "integrations"
pytest.importorskip("sphinx", reason=NEEDS_ALL)
MARKED = [block for block in BLOCKS if block.mark == NOT_RUN]


RUN_UNTIL_STOPPED = ("follow", "mirror")
TAKE_A_VERSION = ("pin", "unpin", "rollback")


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
        elif block.language == "bash":
            for name, *arguments in dbuffer_commands_in(code):
                if name in TAKE_A_VERSION:  # one that is there when this is read again
                    with dbuffer.WeightReceiver(arguments[0]) as receiver:
                        arguments[1] = str(receiver.wait_for_version(timeout_s=0))
                if name == "status":  # without a terminal, it cannot be watched
                    arguments = [argument for argument in arguments if argument != "--watch"]
                run_command(home, name, *arguments)
    return namespace


def run_command(home: Path, name: str, *arguments: str) -> None:
    """Run a command to its end, or until it has shown that it works."""
    with Command(home, name, *arguments) as command:
        if name in RUN_UNTIL_STOPPED or "--watch" in arguments:
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
    sorted({b.page for b in blocks("python") + blocks("bash")} - {TUTORIAL}),
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
        assert re.search(r"def test_|judge\(", (ROOT / name).read_text(encoding="utf-8"))
    if "shown by" in block.reason:
        assert named
    assert not blocks("yaml"), "these are not run at all"
    if block.language == "python":  # a syntax error shows
        compile(block.code, str(block), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)


# Commands.


def commands_in(code: str) -> list[list[str]]:
    lines = code.replace("\\\n", " ").splitlines()
    lines = [re.sub(r" > \S+ 2>&1 &$", "", line) for line in lines]  # in the background
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def dbuffer_commands_in(code: str) -> list[list[str]]:
    return [command[1:] for command in commands_in(code) if command[0] == "dbuffer"]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == "bash"], ids=str)
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
    for block in (b for b in blocks("bash") if b.page == TUTORIAL):
        for command in commands_in(block.code):
            for program in (word for word in command if word.endswith(".py")):
                run.add(Path(program).name)
                options = {word for word in command if word.startswith("--")}
                text = texts[Path(program).name]
                assert all(f'"{option}"' in text for option in options), command
    assert run == set(programs)


def test_the_readme_shows_every_command():
    shown = {name for b in blocks("bash") for name, *_ in dbuffer_commands_in(b.code)}
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
    assert printed("follow", store, "--count", "1") == documented("dbuffer follow --json")
    with dbuffer.WeightReceiver(store, receiver_id="worker-0") as receiver:
        receiver.load_into(list)
    assert printed("status", store) == documented("dbuffer status --json")
    assert printed("verify", store) == documented("dbuffer verify --json")
    with dbuffer.WeightReceiver(store) as receiver, receiver.open() as snapshot:
        answer = weights_of(snapshot.id, is_attested=True)
    with answering(ready(answer)) as url:
        shown = printed("verify", store, "--engine", url)
        assert shown == documented("dbuffer verify --engine URL --json")
    for command in ("pin", "unpin"):
        assert printed(command, store, "1") == documented("dbuffer pin --json")
    assert printed("rollback", store, "1") == documented("dbuffer publish --json")
    assert printed("ls", store) == documented("dbuffer ls --json")
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
    from dbuffer.publish.publisher import Publication

    names = {item.name for item in dataclasses.fields(Publication)}
    assert documented("dbuffer mirror --json").keys() == names - {"id"} | {"version", "run"}


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


def plain_reader() -> Any:
    return runpy.run_path(str(ROOT / "examples" / "plain_reader.py"))["read_newest"]


def test_the_plain_reader_reads_a_file(tmp_path):
    weights = {"weight": torch.arange(700_000.0), "bias": torch.ones(3, dtype=torch.bfloat16)}
    with dbuffer.WeightSender(tmp_path, checksum=True) as sender:
        sender.send(weights)
        sender.send({name: 2 * tensor for name, tensor in weights.items()}, metadata={"step": 2})
    version, metadata, tensors = plain_reader()(tmp_path)
    assert (version, metadata) == (2, {"step": 2})
    for name, tensor in weights.items():
        assert tensors[name].dtype is tensor.dtype
        assert torch.equal(tensors[name], 2 * tensor)


def test_the_plain_reader_reads_parts(shm_path, monkeypatch):
    read_newest = plain_reader()

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


@pytest.fixture
def metric_names(tmp_path: Path) -> dict[str, set[str]]:
    """Names of each metric of the exporters in a query, by its documented name."""
    from prometheus_client import REGISTRY, CollectorRegistry

    from dbuffer.engine.reporting import FollowerReport
    from dbuffer.integrations import metrics

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


NOT_DRAWN = {"dbuffer_run", "dbuffer_sender_run"}
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


def test_every_option_of_an_engine_is_documented():
    from dbuffer.engine.engine_options import EngineOptions

    text = (DOCS / "integrations" / "vllm.md").read_text(encoding="utf-8")
    section = text.split("## Options")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", section, flags=re.MULTILINE)
    shown = {name: default.strip("`") for name, default in rows}
    assert (shown.pop("store"), shown.pop("pause")) == ("required", '"keep"')
    options = {item.name: item.default for item in dataclasses.fields(EngineOptions)}
    del options["store"], options["instance_id"]  # the second is set by who follows
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
    rows = rows_of((DOCS / "compatibility.md").read_text(encoding="utf-8"))
    (needed,) = (row[1] for row in rows if row[0].startswith("vLLM, "))
    shown = re.findall(r"(\w+) ([\d.]+)", needed)
    assert len(shown) == 6
    for name, lowest in shown:
        extra = name.lower()
        assert f"{extra}>={lowest}" in extras["optional-dependencies"][extra]


def public_names() -> list[str]:
    """Names of `dbuffer` besides its errors, which a module documents, and of integrations."""
    names = [f"dbuffer.{name}" for name in dbuffer.__all__ if not name.endswith("Error")]
    names.remove("dbuffer.__version__")
    for package in pkgutil.iter_modules(integrations.__path__, "dbuffer.integrations."):
        module = importlib.import_module(package.name)
        names += [f"{package.name}.{name}" for name in getattr(module, "__all__", ())]
    return names


def test_every_public_name_is_in_the_reference_and_has_an_example():
    """The example is run, or a test shows it, as each item of another project's interface."""
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"\bdbuffer(?:\.\w+)+", text))
    assert {name for name in public_names() if name not in shown} == set()
    code = "\n".join(
        block.code
        for block in BLOCKS
        if block.language in ("python", "bash")
        and (block.mark != NOT_RUN or re.search("shown .*by tests/", block.reason))
    )
    interfaces = (INTEGRATIONS / "interfaces.md").read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", code + interfaces))
    assert {name for name in public_names() if name.rpartition(".")[2] not in words} == set()


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def result(name: str) -> str:
    return (ROOT / "benchmarks" / "results" / name).read_text(encoding="utf-8")


def between(text: str, since: str, until: str | None = None) -> str:
    """Return the part of a text after ``since``, up to ``until``."""
    return text.partition(until or "\0")[0].partition(since)[2]


@pytest.mark.parametrize(
    ("page", "results", "since", "until"),
    [
        ("benchmarks.md", "cpu.txt", "# Benchmarks", "## The pause"),
        ("benchmarks.md", "pause.txt", "## The pause", "## From publish to served"),
        ("benchmarks.md", "served.txt", "## From publish to served", "## GPUs"),
        ("benchmarks.md", "gpu.txt", "## GPUs", "## An engine on a GPU"),
        ("benchmarks.md", "gpu-engine.txt", "## An engine on a GPU", "## Deltas"),
        ("object-storage.md", "links.txt", "## Slow links and outages", "## Retention"),
        ("object-storage.md", "objects.txt", "## Speed", "## Requests and costs"),
    ],
)
def test_figures_are_those_of_the_results(page, results, since, until):
    text = between((DOCS / page).read_text(encoding="utf-8"), since, until)
    shown = [row for row in rows_of(text) if re.search(r"\d\.\d", "".join(row))]
    rows = rows_of(result(results))
    assert shown
    for row in shown:
        assert [re.sub(r"missed.", "FAIL", cell.replace("`", "")) for cell in row] in rows


OTHERS_FIGURES = {"8.25", "21.25", "4.89", "0.067", "3.8", "700", "17.5"}
"""Figures of other projects, with links to them, and of examples."""


def test_figures_in_the_text_of_pages_are_those_of_the_results():
    """A figure of a page may be rounded. All figures in tables of the benchmarks are compared."""
    measured = set(OTHERS_FIGURES)
    for file in (ROOT / "benchmarks" / "results").glob("*.txt"):
        for figure in re.findall(r"\d+(?:\.\d+)?", result(file.name).replace(",", "")):
            measured |= {figure, f"{float(figure):.0f}", f"{float(figure):.1f}"}
    in_text = re.compile(
        r"(?<![\w.\-=])(\d+\.\d+(?= (?:ms|s|min|h|GB|MB|GB/s|%|times))|\d+(?= ms))\b"
    )
    for page in (page for page in PAGES if page != TUTORIAL):
        text = re.sub("```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        figures = [
            figure
            for paragraph in text.split("\n\n")
            if "in the history of" not in paragraph
            for figure in in_text.findall(paragraph)
        ]
        if page.name == "benchmarks.md":
            figures += re.findall(r"\d+\.\d+", str(rows_of(text)))
        unknown = [figure for figure in figures if figure not in measured]
        assert not unknown, f"{relative(page)} has figures that no file of results has: {unknown}"


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
    rows = rows_of((INTEGRATIONS / "interfaces.md").read_text(encoding="utf-8"))
    items = [row for row in rows if row[0] not in ("item", "---")]
    assert len(items) > 50
    for item, test in items:
        if test != "none: not provided":
            file, _, name = test.strip("`").partition("::")
            source = (INTEGRATIONS / file).read_text(encoding="utf-8")
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


@IN_SOAKS_ALONE
def test_the_site_builds_without_a_warning(tmp_path):
    assert build(DOCS, tmp_path / "site") == (0, "")
    assert "Six guarantees" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert "receivers. Default: one from what" in reference
    assert ">Type<" not in reference  # words of a docstring, taken for an attribute's type
