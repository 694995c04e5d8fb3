"""``dbuffer follow``: print versions, run a command for each, or switch a server to them."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import dbuffer
from dbuffer import errors
from dbuffer.runtime import options
from dbuffer.runtime.messages import format_bytes
from dbuffer.runtime.trouble import Trouble
from dbuffer.store.buffer import DoubleBuffer
from dbuffer.store.filesystem import path_of
from dbuffer.tools.commands import shared
from dbuffer.tools.commands.follow_server import Server, follow_server

if TYPE_CHECKING:
    from dbuffer.receive.snapshot import Snapshot

logger = logging.getLogger(__name__)

_LOOK_S = 1.0
"""How often it can be logged that trouble with a store is over, while nothing new comes."""

_MAX_VARIABLE_BYTES = 128 << 10
"""Linux's limit for one variable of an environment, with its name and the zero at its end."""


def follow(
    store: shared.StoreArgument,
    command: Annotated[
        str | None,
        typer.Option(
            "--exec",
            metavar="CMD",
            help="Run this shell command for each version, with DBUFFER_VERSION, DBUFFER_STORE, "
            "DBUFFER_WEIGHTS (a file, safe to read until the command ends; on a network mount a "
            "copy in TMPDIR) and DBUFFER_METADATA_FILE (JSON) in its environment, and the same "
            "JSON in DBUFFER_METADATA if it is below 128 KB. A failing command stops following, "
            "and its version is not acknowledged.",
        ),
    ] = None,
    newer_than: Annotated[
        int | None, typer.Option(help="Begin above this version.  [default: with what is there]")
    ] = None,
    count: shared.CountOption = None,
    timeout_s: Annotated[
        float | None,
        typer.Option(help="Stop with exit code 3 if no version comes for this many seconds."),
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
            help="Keep the SGLang server at this address on the newest version. It must be started "
            "with --custom-weight-loader dbuffer.integrations.sglang.load_from_store.",
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
        typer.Option(envvar="VLLM_API_KEY", show_envvar=True, help="The server's API key."),
    ] = None,
    pause: Annotated[
        str,
        typer.Option(
            help="What happens to the server's requests in flight during a switch: 'keep', 'abort' "
            "or (vLLM only) 'wait'."
        ),
    ] = "keep",
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="Versions may hold a part of the vLLM server's model; the rest stays as it is.",
        ),
    ] = False,
    unused_tensors: Annotated[
        str,
        typer.Option(
            metavar="refuse|warn",
            help="With --vllm or --sglang, when a version has tensors that the server's model has "
            "no place for: 'refuse' it; or 'warn' once, and leave them out.",
        ),
    ] = "refuse",
    new_history: Annotated[
        str,
        typer.Option(
            metavar="follow|refuse",
            help="When the store was emptied or replaced by another run: 'follow' the new "
            "versions, with a warning; or 'refuse' them, and stop.",
        ),
    ] = "follow",
    as_json: shared.JsonLinesOption = False,
    allow_shared_store: shared.SharedOption = False,
    *,
    context: typer.Context,
) -> None:
    """Print each new version as it comes, and acknowledge it; with --exec, run a command.

    With --vllm or --sglang, switch a server to it instead, and print how long that took. The
    server is resumed after each switch; one that was restarted is switched again.
    """
    if timeout_s is not None:
        options.seconds("timeout_s", timeout_s)
    options.choice("pause", pause, ("keep", "abort", "wait"))
    options.choice("new_history", new_history, ("follow", "refuse"))
    options.choice("unused_tensors", unused_tensors, ("refuse", "warn"))
    has_server = vllm is not None or sglang is not None
    _refuse_unless(sglang is not None, "--sglang", context, "rename")
    _refuse_unless(vllm is not None, "--vllm", context, "partial")
    _refuse_unless(has_server, "--vllm or --sglang", context, "pause", "api_key", "unused_tensors")
    if has_server:
        if command is not None or newer_than is not None or None not in (vllm, sglang):
            raise typer.BadParameter(
                "use one of these at a time", param_hint="--exec, --newer-than, --vllm, --sglang"
            )
        follow_server(
            Server(vllm or sglang or "", sglang is not None, api_key, pause, rename),
            store,
            count=count,
            timeout_s=timeout_s,
            as_json=as_json,
            engine_id=receiver_id,
            verify=verify_checksums or "auto",
            allow_shared_store=allow_shared_store,
            partial=partial,
            unused_tensors=unused_tensors,
            new_history=new_history,
        )
        return
    receiver = dbuffer.WeightReceiver(
        store,
        receiver_id=receiver_id,
        verify=verify_checksums or "auto",
        allow_shared_store=allow_shared_store,
    )
    with receiver:
        receiver.wait_for_version(newer_than, 0.0)  # what is wrong from the start is an error
        shared.explain_wait(store)
        while count is None or count > 0:
            held = contextlib.ExitStack()
            snapshot = _hold_next(receiver, held, newer_than, timeout_s, new_history)
            # That the store was emptied meanwhile is found, and decided on, by the next look.
            with contextlib.suppress(errors.VersionRegressedError), held:
                _report(snapshot, as_json=as_json)
                if command is not None:
                    _execute(command, store, snapshot)
            newer_than = snapshot.version
            count = None if count is None else count - 1


def _refuse_unless(is_used: bool, with_option: str, context: typer.Context, *names: str) -> None:
    """Refuse options that were given on the command line, and that nothing uses."""
    for name in () if is_used else names:
        source = context.get_parameter_source(name)
        # One from an environment variable may be meant for other commands.
        if source is not None and source.name == "COMMANDLINE":
            hint = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"only together with {with_option}", param_hint=hint)


def _hold_next(
    receiver: dbuffer.WeightReceiver,
    held: contextlib.ExitStack,
    newer_than: int | None,
    timeout_s: float | None,
    new_history: str,
) -> Snapshot:
    """Wait for the next version, also while the store cannot be read."""
    deadline = time.monotonic() + timeout_s if timeout_s is not None else math.inf
    trouble = Trouble(logger)
    while True:
        left_s = max(0.0, deadline - time.monotonic())
        try:
            if receiver.wait_for_version(newer_than, min(left_s, _LOOK_S)) is not None:
                snapshot = held.enter_context(receiver.open(newer_than))
                trouble.end(str(receiver.store))
                return snapshot
        except (errors.DBufferError, OSError) as error:
            if isinstance(error, errors.VersionRegressedError) and error.history is not None:
                if new_history == "refuse":
                    raise
                logger.warning("%s (following it)", error)
                receiver.start_over()
                newer_than = None
                continue
            wait_s = trouble.note(error)
            if wait_s >= left_s:
                raise
            time.sleep(wait_s)
            continue
        trouble.end(str(receiver.store))
        if left_s <= 0:
            there = DoubleBuffer(receiver.store).state_without_version()
            raise errors.WaitTimeoutError(
                f"nothing new for {timeout_s:g} s in {receiver.store}{there}"
            )


def _report(snapshot: Snapshot, *, as_json: bool) -> None:
    num_tensors = len(snapshot.specs)
    num_bytes = sum(spec.num_bytes for spec in snapshot.specs)
    counts = {"version": snapshot.version, "num_tensors": num_tensors, "num_bytes": num_bytes}
    if as_json:
        shared.print_json({**counts, "metadata": snapshot.metadata})
        return
    metadata = f"  {json.dumps(snapshot.metadata)}" if snapshot.metadata else ""
    shared.print_line(
        f"version {snapshot.version}: {num_tensors} tensors, {format_bytes(num_bytes)}{metadata}"
    )


def _execute(command: str, store: Path, snapshot: Snapshot) -> None:
    metadata = json.dumps(snapshot.metadata)
    with snapshot.as_file() as weights, tempfile.TemporaryFile("w") as metadata_file:
        metadata_file.write(metadata)
        metadata_file.flush()
        environment = {
            **os.environ,
            "DBUFFER_VERSION": str(snapshot.version),
            "DBUFFER_STORE": str(store),
            "DBUFFER_WEIGHTS": str(weights),
            "DBUFFER_METADATA": metadata,
            "DBUFFER_METADATA_FILE": str(path_of(metadata_file.fileno())),
        }
        if len(f"DBUFFER_METADATA={metadata}") >= _MAX_VARIABLE_BYTES:
            del environment["DBUFFER_METADATA"]
            logger.warning(
                "metadata of %d bytes does not fit into DBUFFER_METADATA; read it from the file "
                "that DBUFFER_METADATA_FILE names",
                len(metadata),
            )
        # A shell command is what --exec promises.
        done = subprocess.run(command, shell=True, env=environment, check=False)  # noqa: S602
    if done.returncode:
        raise errors.DBufferError(
            f"the command for version {snapshot.version} ended with {done.returncode}: {command}"
        )
