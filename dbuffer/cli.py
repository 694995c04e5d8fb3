"""The command line, on the public parts only.

Exit codes: 0 all is well; 1 something failed or was found wrong; 2 wrong usage; 3 nothing was
published in time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from dbuffer import Mirror, NameMap, WeightReceiver, WeightSender, __version__
from dbuffer.buffer import DoubleBuffer
from dbuffer.checkpoint import read_checkpoint
from dbuffer.comparison import Comparison, compare
from dbuffer.doctor import examine, wait_for_host
from dbuffer.errors import (
    DBufferError,
    EngineUnsupportedError,
    OptionError,
    VersionTimeoutError,
)
from dbuffer.layout import Layout
from dbuffer.mirror import Copied
from dbuffer.render import (
    comparison_table,
    describe_check,
    doctor_table,
    format_bytes,
    status_tables,
)
from dbuffer.snapshot import Snapshot
from dbuffer.sources import spec_of
from dbuffer.status import read_status
from dbuffer.tensors import DTYPES
from dbuffer.verification import verify_store

if TYPE_CHECKING:
    from dbuffer.integrations.engine.follower import Follower, Switch
    from dbuffer.integrations.engine.options import EngineOptions

EXIT_FAILED = 1
EXIT_TIMEOUT = 3

app = typer.Typer(
    name="dbuffer",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Move weights from a trainer to its inference workers through a directory.

A *store* is a directory with two buffers and a pointer to the newest one. `publish` writes a
checkpoint into it, `follow` reacts to each new version, `status` shows who is where.

Try it: `dbuffer demo` trains a small model while a real vLLM engine samples from it.
""",
)
console = Console()
errors = Console(stderr=True)

StoreArgument = Annotated[Path, typer.Argument(help="The store's directory.", show_default=False)]
SharedOption = Annotated[
    bool,
    typer.Option(
        "--allow-shared-store",
        help="Accept a directory that belongs to someone else, or that others can write to.",
    ),
]
NamesOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Rename tensors by the rules in this JSON file.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object, for machines.")]


def run(arguments: Sequence[str]) -> int:
    """Run a command; its exit code. An error is one line on stderr, with --debug a traceback."""
    arguments = list(arguments)
    debug = "--debug" in arguments
    if debug:  # accepted in any place
        arguments.remove("--debug")
    handler = RichHandler(console=errors, show_path=False, show_time=debug)
    logging.basicConfig(
        level=logging.DEBUG if debug else logging.WARNING, format="%(message)s", handlers=[handler]
    )
    try:
        app(arguments)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except (DBufferError, OSError) as error:
        if debug:
            raise
        print(f"dbuffer: {error}", file=sys.stderr)
        return EXIT_TIMEOUT if isinstance(error, VersionTimeoutError) else EXIT_FAILED
    return 0


def _print_version(value: bool) -> None:
    if value:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def _options(
    _debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and all that is logged.")
    ] = False,
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None: ...


@app.command()
def publish(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            help="A HuggingFace checkpoint directory, or one .safetensors file.",
            show_default=False,
        ),
    ],
    store: StoreArgument,
    version: Annotated[
        int | None,
        typer.Option(help="Must be above the last one.  [default: the last one + 1]"),
    ] = None,
    metadata: Annotated[
        str, typer.Option(help="""A JSON object that goes with it, as '{"step": 80}'.""")
    ] = "{}",
    dtype: Annotated[
        str | None, typer.Option(help="Cast floating-point tensors, as 'bfloat16'.")
    ] = None,
    checksum: Annotated[
        bool, typer.Option(help="Write checksums, so that `dbuffer verify` can prove every byte.")
    ] = True,
    durable: Annotated[
        bool, typer.Option("--durable", help="Flush to stable storage before publishing.")
    ] = False,
    names: NamesOption = None,
    as_json: JsonOption = False,
    allow_shared_store: SharedOption = False,
) -> None:
    """Publish a checkpoint as the store's newest version."""
    sender = WeightSender(
        store,
        checksum=checksum,
        durable=durable,
        dtype=_parse_dtype(dtype),
        rename=None if names is None else NameMap.read(names),
        allow_shared_store=allow_shared_store,
    )
    with sender, _progress(hidden=as_json) as progress:
        task = progress.add_task(str(checkpoint), total=None)
        publication = sender.send(
            checkpoint,
            version=version,
            metadata=_parse_metadata(metadata),
            progress=lambda done, total: progress.update(task, completed=done, total=total or None),
        )
    if as_json:
        _print_json(dataclasses.asdict(publication))
        return
    speed = publication.num_bytes / max(publication.duration_s, 1e-9)
    console.print(
        f"version {publication.version}: {publication.num_tensors} tensors, "
        f"{format_bytes(publication.num_bytes)} in {publication.duration_s:.2f} s "
        f"({format_bytes(speed)}/s)"
    )


@app.command()
def follow(
    store: StoreArgument,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="CMD",
            help="Run this shell command for each version, with DBUFFER_VERSION, DBUFFER_STORE, "
            "DBUFFER_WEIGHTS (the file, safe to read until the command ends) and "
            "DBUFFER_METADATA (JSON) in its environment. A failing command ends the following, "
            "and its version is not acknowledged.",
        ),
    ] = None,
    newer_than: Annotated[
        int | None,
        typer.Option(help="Begin above this version.  [default: with what is there]"),
    ] = None,
    count: Annotated[
        int | None, typer.Option(help="Stop after so many versions.  [default: never]")
    ] = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(help="Stop with exit code 3 if no version comes for so long."),
    ] = None,
    receiver_id: Annotated[
        str | None, typer.Option(help="The name under which versions are acknowledged.")
    ] = None,
    verify_checksums: Annotated[
        bool, typer.Option("--verify", help="Check every tensor's checksum.")
    ] = False,
    vllm: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Keep the vLLM server at this address on the newest version. It must run with "
            "VLLM_SERVER_DEV_MODE=1, and see the store under the same path.",
        ),
    ] = None,
    sglang: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The same for an SGLang server, started with --custom-weight-loader "
            "dbuffer.integrations.sglang.load_from_store.",
        ),
    ] = None,
    rename: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="With --sglang: a mapping file, from the store's names to the server's.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", show_envvar=True, help="The server's key."),
    ] = None,
    pause: Annotated[
        str,
        typer.Option(
            help="What becomes of the server's requests in flight at a switch: 'keep', 'abort' or "
            "(vLLM only) 'wait'."
        ),
    ] = "keep",
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="Versions may hold a part of the vLLM server's model; the rest stays as it is.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    allow_shared_store: SharedOption = False,
) -> None:
    """Print each new version as it comes, and acknowledge it; with --exec, run a command.

    With --vllm or --sglang, switch a server to it instead, and print how long that took. The
    server is always resumed; one that is restarted is switched again.
    """
    if rename is not None and sglang is None:
        raise typer.BadParameter("only together with --sglang", param_hint="--rename")
    url = vllm or sglang
    if url is not None:
        if command is not None or newer_than is not None or None not in (vllm, sglang):
            raise typer.BadParameter(
                "one of these at a time", param_hint="--exec, --newer-than, --vllm, --sglang"
            )
        from dbuffer.integrations.engine.options import EngineOptions

        options = EngineOptions(
            store=str(store.absolute()),
            engine_id=receiver_id,
            verify=verify_checksums or "auto",
            allow_shared_store=allow_shared_store,
            partial=partial,
        )
        make = functools.partial(
            _make_follower, url, options, api_key, pause, is_sglang=vllm is None, rename=rename
        )
        _follow_with_server(url, make, count=count, timeout_s=timeout_s, as_json=as_json)
        return
    if partial:
        raise typer.BadParameter("goes with --vllm", param_hint="--partial")
    receiver = WeightReceiver(
        store,
        receiver_id=receiver_id,
        verify=verify_checksums or "auto",
        allow_shared_store=allow_shared_store,
    )
    with receiver:
        while count is None or count > 0:
            if receiver.wait_for_version(newer_than, timeout_s) is None:
                raise VersionTimeoutError(f"nothing new in {store} for {timeout_s:g} s")
            with receiver.open(newer_than) as snapshot:
                _report(snapshot, as_json=as_json)
                if command is not None:
                    _execute(command, store, snapshot)
            newer_than = snapshot.version
            count = None if count is None else count - 1


@app.command()
def mirror(
    remote: Annotated[
        Path, typer.Argument(help="The store to follow, on a network mount.", show_default=False)
    ],
    local: Annotated[
        Path,
        typer.Argument(help="The store to keep up to date, on /dev/shm.", show_default=False),
    ],
    count: Annotated[
        int | None, typer.Option(help="Stop after so many versions.  [default: never]")
    ] = None,
    poll_interval_s: Annotated[
        float, typer.Option(help="How often to look at the remote store.")
    ] = 1.0,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics on this port.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    allow_shared_store: SharedOption = False,
) -> None:
    """Copy each newest version into a local store, for all workers of this node.

    Start one on each node, or several: one of them works, and the others stand by. It may be
    stopped and started at any time. Mirrors can follow mirrors.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with _progress(hidden=as_json) as bars:
        task = bars.add_task(str(remote), total=None, visible=False)
        copied_versions = 0

        def report(copied: Copied) -> None:
            nonlocal copied_versions
            bars.update(task, visible=False)
            _report_copied(copied, as_json=as_json)
            copied_versions += 1
            if copied_versions == count:
                stop.set()

        copying = Mirror(
            remote,
            local,
            poll_interval_s=poll_interval_s,
            allow_shared_store=allow_shared_store,
            on_copied=report,
            progress=lambda done, total: bars.update(
                task, completed=done, total=total, visible=True
            ),
        )
        with copying:
            if metrics_port is not None:
                _serve_mirror_metrics(copying, metrics_port)
            copying.run(stop)


@app.command()
def status(
    store: StoreArgument,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing it, twice a second.")
    ] = False,
    as_json: JsonOption = False,
    allow_shared_store: SharedOption = False,
) -> None:
    """Show versions, buffers, the sender, and how far each receiver is."""
    view = DoubleBuffer(store, allow_shared_store=allow_shared_store)
    found = read_status(view)
    if as_json:
        _print_json(dataclasses.asdict(found))
    elif not watch:
        console.print(status_tables(found))
    else:
        with Live(status_tables(found), console=console) as live:
            while True:
                time.sleep(0.5)
                live.update(status_tables(read_status(view)))


@app.command()
def verify(
    store: StoreArgument, as_json: JsonOption = False, allow_shared_store: SharedOption = False
) -> None:
    """Check both versions in the store: records, layout, sizes and, where it has them, checksums.

    Exit code 1 if something is off; what it is, and in which tensor, is printed.
    """
    checks = verify_store(DoubleBuffer(store, allow_shared_store=allow_shared_store))
    if as_json:
        _print_json([dataclasses.asdict(check) for check in checks])
    else:
        for check in checks:
            console.print(describe_check(check), markup=False, highlight=False, soft_wrap=True)
    if any(check.problems for check in checks):
        raise typer.Exit(EXIT_FAILED)


@app.command()
def ls(
    store: StoreArgument,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL_DIR",
            help="Compare with the tensors of this HuggingFace checkpoint instead: what matches, "
            "what is missing, what is left over. Exit code 1 if it does not fit.",
        ),
    ] = None,
    names: NamesOption = None,
    as_json: JsonOption = False,
    allow_shared_store: SharedOption = False,
) -> None:
    """List the newest version's tensors: name, dtype, shape, bytes."""
    held = DoubleBuffer(store, allow_shared_store=allow_shared_store).hold_newest(newer_than=None)
    if held is None:
        raise VersionTimeoutError(f"nothing was published in {store} yet")
    try:
        version, layout = held.manifest.version, held.read_layout()
    finally:
        held.release()
    if against is not None:
        _compare(version, layout, against, names, as_json=as_json)
        return
    if names is not None:
        raise typer.BadParameter("only together with --against", param_hint="--names")
    if as_json:
        tensors = [{**spec._asdict(), "num_bytes": spec.num_bytes} for spec in layout.specs]
        _print_json({"version": version, "tensors": tensors, "aliases": layout.aliases})
        return
    table = Table("name", "dtype", "shape", "bytes", title=f"version {version}")
    for spec in layout.specs:
        shape = "x".join(map(str, spec.shape)) or "scalar"
        table.add_row(spec.name, spec.dtype, shape, format_bytes(spec.num_bytes))
    for alias, name in layout.aliases.items():
        table.add_row(alias, "", f"tied to {name}", "")
    console.print(table)


def _compare(
    version: int, layout: Layout, model: Path, names: Path | None, *, as_json: bool
) -> None:
    needed = starmap(spec_of, zip(*read_checkpoint(model), strict=True))
    comparison = compare(layout, needed, None if names is None else NameMap.read(names))
    if as_json:
        _print_json({"version": version, "fits": comparison.fits, **_json_of(comparison)})
    else:
        console.print(comparison_table(comparison, f"version {version} against {model}"))
    if not comparison.fits:
        raise typer.Exit(EXIT_FAILED)


def _json_of(comparison: Comparison) -> dict[str, Any]:
    return {
        "matching": [spec.name for spec in comparison.matching],
        "missing": [spec._asdict() for spec in comparison.missing],
        "left_over": [spec._asdict() for spec in comparison.left_over],
        "differing": [
            {"published": published._asdict(), "needed": needed._asdict()}
            for published, needed in comparison.differing
        ],
        "unused_rules": [dataclasses.asdict(rule) for rule in comparison.unused_rules],
    }


@app.command()
def doctor(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A store, or where one is to be.", show_default=False),
    ],
    peer: Annotated[
        bool,
        typer.Option(
            "--peer", help="Be the second host: wait for a `doctor DIR` on another, and answer it."
        ),
    ] = False,
    timeout_s: Annotated[
        float | None,
        typer.Option(
            help="How long to wait for the other host, before exit code 3.  "
            "[default: 600 with --peer; without, only a peer that waits already is measured with]"
        ),
    ] = None,
    as_json: JsonOption = False,
    allow_shared_store: SharedOption = False,
) -> None:
    """Tell what a mount is, what works on it, and what dbuffer does about that.

    Probes in a directory of its own inside DIR, and removes it; a store that is there is not
    touched. With `dbuffer doctor DIR --peer` on another host, it also measures how late each
    sees what the other writes. Exit code 1 if a guarantee cannot hold there.
    """
    if peer:
        _doctor_as_peer(directory, 600.0 if timeout_s is None else timeout_s, as_json=as_json)
        return
    with _ended_by_sigterm(), _progress_line(hidden=as_json) as progress:
        found = examine(
            directory,
            timeout_s=timeout_s or 0.0,
            allow_shared_store=allow_shared_store,
            progress=progress,
        )
    if as_json:
        _print_json({"is_sound": not found.broken, **dataclasses.asdict(found)})
    else:
        console.print(doctor_table(found))
    if found.broken:
        raise typer.Exit(EXIT_FAILED)
    if timeout_s and not found.peers:
        raise typer.Exit(EXIT_TIMEOUT)


@app.command()
def demo(
    engine: Annotated[
        str, typer.Option(help="'vllm', or 'torch' for the same loop with a plain torch policy.")
    ] = "vllm",
    steps: Annotated[int, typer.Option(help="Training steps.")] = 40,
    output: Annotated[
        Path, typer.Option(help="Directory for the plot and the engine's log.")
    ] = Path("dbuffer-demo"),
    seed: Annotated[int, typer.Option(help="Seed of weights and sampling.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Train a tiny model by reinforcement learning, sampled by a real vLLM engine.

    The engine, in a process of its own, follows the trainer through a store. The reward can only
    climb if the weights reach it; at the end its greedy tokens are compared with those of a fresh
    engine on the trainer's final checkpoint.
    """
    try:
        from dbuffer import demo as package
    except ModuleNotFoundError as error:
        raise DBufferError(f"the demo needs {error.name}: pip install 'dbuffer[demo]'") from error
    options = package.DemoOptions(output=output, engine=engine, steps=steps, seed=seed)  # type: ignore[arg-type]  # checked by the class
    result = package.show_demo(options, errors if as_json else console)
    if as_json:
        _print_json(result.as_dict())
    if not result.success:
        raise typer.Exit(EXIT_FAILED)


def _make_follower(
    url: str,
    options: EngineOptions,
    api_key: str | None,
    pause: str,
    *,
    is_sglang: bool,
    rename: Path | None,
) -> Follower:
    try:
        if is_sglang:
            from dbuffer.integrations.sglang.follower import server_follower

            return server_follower(url, options, pause=pause, rename=rename, api_key=api_key)
        from dbuffer.integrations.engine.follower import Follower
        from dbuffer.integrations.vllm.engines import ServerEngine

        server = ServerEngine(url, api_key=api_key)
    except ModuleNotFoundError as error:
        raise DBufferError(f"this needs {error.name}: pip install '{error.name}'") from error
    return Follower(server, options, pause=pause)  # type: ignore[arg-type]  # checked there


def _follow_with_server(
    url: str,
    make: Callable[[], Follower],
    *,
    count: int | None,
    timeout_s: float | None,
    as_json: bool,
) -> None:
    stop = threading.Event()
    # A switch that has begun must end with the server resumed, also when this is asked to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    last = time.monotonic()
    with make() as follower:
        from dbuffer.integrations.engine.follower import Switch, follow_for_ever

        for outcome in follow_for_ever(follower, stop):
            if isinstance(outcome, Switch):
                last = time.monotonic()
                _report_switch(url, outcome, as_json=as_json)
                count = None if count is None else count - 1
                if count == 0:
                    return
            elif isinstance(outcome, EngineUnsupportedError | OptionError):
                raise outcome  # waiting mends neither
            elif timeout_s is not None and time.monotonic() - last > timeout_s:
                raise VersionTimeoutError(
                    f"no switch of {url} for {timeout_s:g} s: {outcome or 'nothing new'}"
                )


def _report_copied(copied: Copied, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(copied)), flush=True)
        return
    speed = copied.num_bytes / max(copied.duration_s, 1e-9)
    console.print(
        f"version {copied.version}: {copied.num_tensors} tensors, "
        f"{format_bytes(copied.num_bytes)} in {copied.duration_s:.2f} s ({format_bytes(speed)}/s)"
    )


def _serve_mirror_metrics(copying: Mirror, port: int) -> None:
    try:
        from prometheus_client import start_http_server

        from dbuffer.integrations.mirror_metrics import register
    except ModuleNotFoundError as error:
        raise DBufferError(f"--metrics-port needs {error.name}: pip install it") from error
    register(copying)
    start_http_server(port)


def _report_switch(url: str, switch: Switch, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(dataclasses.asdict(switch)), flush=True)
        return
    console.print(
        f"version {switch.version}: {url} switched, ready after {1e3 * switch.wait_s:.1f} ms, "
        f"paused for {1e3 * switch.pause_s:.1f} ms",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _parse_dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    if name not in DTYPES:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(DTYPES)}", param_hint="--dtype")
    return DTYPES[name]


def _parse_metadata(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--metadata") from None
    if not isinstance(value, dict):
        raise typer.BadParameter("not a JSON object", param_hint="--metadata")
    return value


def _progress(*, hidden: bool) -> Progress:
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    return Progress(
        *columns, console=errors, disable=hidden or not errors.is_terminal, transient=True
    )


def _report(snapshot: Snapshot, *, as_json: bool) -> None:
    num_bytes = sum(spec.num_bytes for spec in snapshot.specs)
    if as_json:
        seen = {
            "version": snapshot.version,
            "num_tensors": len(snapshot.specs),
            "num_bytes": num_bytes,
            "metadata": snapshot.metadata,
        }
        print(json.dumps(seen), flush=True)
        return
    metadata = f"  {json.dumps(snapshot.metadata)}" if snapshot.metadata else ""
    line = f"version {snapshot.version}: {len(snapshot.specs)} tensors, {format_bytes(num_bytes)}"
    console.print(line + metadata, markup=False, soft_wrap=True)


def _execute(command: str, store: Path, snapshot: Snapshot) -> None:
    environment = {
        **os.environ,
        "DBUFFER_VERSION": str(snapshot.version),
        "DBUFFER_STORE": str(store),
        "DBUFFER_WEIGHTS": str(snapshot.path),
        "DBUFFER_METADATA": json.dumps(snapshot.metadata),
    }
    # A shell command is what --exec promises.
    done = subprocess.run(command, shell=True, env=environment, check=False)  # noqa: S602
    if done.returncode:
        raise DBufferError(
            f"the command for version {snapshot.version} ended with {done.returncode}: {command}"
        )


def _doctor_as_peer(directory: Path, timeout_s: float, *, as_json: bool) -> None:
    with _ended_by_sigterm(), _progress_line(hidden=as_json) as progress:
        report = wait_for_host(directory, timeout_s=timeout_s, progress=progress)
    if report is None:
        raise VersionTimeoutError(f"no 'dbuffer doctor {directory}' came within {timeout_s:g} s")
    if as_json:
        _print_json(dataclasses.asdict(report))
    else:
        console.print(
            f"measured with process {report.pid} on {report.host}, which has the results",
            markup=False,
            soft_wrap=True,
        )


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM end a block as Ctrl-C would: what was made in a user's directory is removed."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _progress_line(*, hidden: bool) -> Iterator[Callable[[str], None] | None]:
    if hidden or not errors.is_terminal:
        yield None
        return
    with errors.status("") as line:
        yield lambda text: line.update(Text(text))


def _print_json(value: Any) -> None:
    print(json.dumps(value, default=str))
