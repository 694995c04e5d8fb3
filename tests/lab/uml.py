"""The parts of the lab's machines: a kernel that runs as a process, and the programs of NFS.

They are the distribution's own packages, downloaded and unpacked, never installed: nothing on
this machine changes but one directory in the user's cache.
"""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGES = ("user-mode-linux", "nfs-kernel-server", "dmsetup", "e2fsprogs", "iproute2", "kmod")
"""With those that they depend on, and less those that this machine has anyway."""

_LAYOUT = 1
"""Counted up when what is unpacked changes; another number is another directory."""

_DOWNLOAD_TIMEOUT_S = 180.0


class UnavailableError(Exception):
    """This machine cannot run the lab; the message says why."""


def cache_directory() -> Path:
    """Where the parts are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "dbuffer-nfs-lab"


def parts() -> Path:
    """The directory with the parts, fetched first if they are not there yet.

    It holds ``uml/`` (the kernel and its modules) and ``root/`` (programs, to be laid over the
    root directory).

    Raises:
        UnavailableError: this is no Debian-like x86-64 machine, or its packages cannot be had.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise UnavailableError(f"runs on Linux, x86-64, not on {platform.platform()}")
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise UnavailableError(f"fetches Debian packages, and there is no {program} here")
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    unpacked = cache / f"parts-{_LAYOUT}"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may come at once
        if not unpacked.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as directory:
                _fetch(Path(directory))
                (Path(directory) / "parts").rename(unpacked)
    return unpacked


def preloaded(directory: Path) -> list[str]:
    """Return words that start the kernel on this processor, after making what they name.

    Raises:
        UnavailableError: they need a C compiler, and there is none.
    """
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    if "amx_tile" not in flags:
        return []
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise UnavailableError("needs a C compiler on a processor with AMX")
    library, source = directory / "xstate.so", Path(__file__).with_name("xstate.c")
    _run([compiler, "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], directory)
    return ["/usr/bin/env", f"LD_PRELOAD={library}"]


def _fetch(directory: Path) -> None:
    debs = directory / "debs"
    debs.mkdir()
    try:
        _download(debs, [])
    except UnavailableError:
        # Container images come without package lists. They are fetched beside the system's own,
        # which needs no rights and leaves those alone.
        lists = directory / "lists"
        (lists / "partial").mkdir(parents=True)
        options = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={directory}"]
        _apt([*options, "update"], debs)
        _download(debs, options)
    uml, root = directory / "parts/uml", directory / "parts/root"
    for deb in debs.glob("*.deb"):
        to = uml if deb.name.startswith("user-mode-linux_") else root
        to.mkdir(parents=True, exist_ok=True)
        _run(["dpkg-deb", "--extract", str(deb), str(to)], debs)
    _tidy(root)


def _download(debs: Path, options: list[str]) -> None:
    """Download what an installation would have to add to this machine."""
    wanted = ["--simulate", "--no-install-recommends", "--no-upgrade", "install", *PACKAGES]
    plan = _apt([*options, *wanted], debs)
    names = [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    _apt([*options, "download", *names], debs)
    if not list(debs.glob("user-mode-linux_*.deb")):
        raise UnavailableError("apt-get downloaded no user-mode-linux; is it installed here?")


def _tidy(root: Path) -> None:
    """Let the tree fit over a root directory whose ``/bin`` is a link to ``/usr/bin``."""
    for name in ("bin", "sbin", "lib"):
        if (root / name).is_dir():
            shutil.copytree(root / name, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
    for path in root.iterdir():
        if path.name not in ("usr", "etc"):
            shutil.rmtree(path)
    shutil.rmtree(root / "usr/share", ignore_errors=True)
    for name in ("insmod", "modprobe"):  # links to an absolute path
        if (root / "usr/bin/kmod").exists():
            (root / "usr/sbin" / name).unlink(missing_ok=True)
            (root / "usr/sbin" / name).symlink_to("../bin/kmod")


def _apt(arguments: list[str], directory: Path) -> str:
    # Its own unprivileged user may not enter our cache.
    return _run(["apt-get", "-q", "-o", "APT::Sandbox::User=root", *arguments], directory)


def _run(command: list[str], directory: Path) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{' '.join(command)} took longer than {error.timeout} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip())[-1000:]
        raise UnavailableError(f"{' '.join(command)} failed: {said}")
    return done.stdout
