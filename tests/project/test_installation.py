"""Commands of docs/installation.md, and of the image of vLLM, in new environments.

They need no package index: what dbuffer depends on comes from the tests' environment.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
import torch

from tests.support import ROOT
from tests.support.documents import DOCS, CodeBlock, blocks_of
from tests.support.soak import IN_SOAKS_ALONE

PAGE = DOCS / "installation.md"
IMAGE = ROOT / "examples" / "vllm.Dockerfile"
IGNORED = shutil.ignore_patterns("__pycache__")


class Environment:
    """A new environment that sees all packages of the tests' but dbuffer, and no index."""

    def __init__(self, place: Path) -> None:
        packages = place / "packages"
        packages.mkdir(parents=True)
        for entry in Path(distribution("torch").locate_file("")).iterdir():
            if "dbuffer" not in entry.name and entry.suffix != ".pth":
                (packages / entry.name).symlink_to(entry)
        venv.create(place / "venv", symlinks=True)
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        site = place / "venv" / "lib" / version / "site-packages"
        (site / "packages.pth").write_text(f"{packages}\n")
        self.bin = place / "venv" / "bin"
        self.variables = os.environ | {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip takes 0 here for "no isolation"
            "PIP_NO_CACHE_DIR": "1",
            "PIP_NO_INDEX": "1",
        }
        for name in ("PYTHONPATH", "VIRTUAL_ENV"):
            self.variables.pop(name, None)

    def run(self, command: str, cwd: Path) -> str:
        done = subprocess.run(
            command,
            shell=True,
            cwd=cwd,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr}"
        return done.stdout

    def check(self, cwd: Path) -> None:
        """See that dbuffer works from here, vLLM would load it, and torch is the same."""
        program = (
            "import dbuffer, json, torch\n"
            "from importlib.metadata import entry_points\n"
            "dbuffer.WeightSender('store').send({'a': torch.ones(3)})\n"
            "with dbuffer.WeightReceiver('store').open() as snapshot:\n"
            "    assert snapshot.tensors['a'].sum() == 3\n"
            "points = entry_points(group='vllm.general_plugins', name='dbuffer')\n"
            "print(json.dumps([dbuffer.__file__, torch.__version__, [p.value for p in points]]))\n"
        )
        found = json.loads(self.run(f"python3 -c {shlex.quote(program)}", cwd))
        assert found[0].startswith(str(self.bin.parent))
        assert found[1:] == [torch.__version__, ["dbuffer.integrations.vllm.plugin:register"]]
        assert "publish" in self.run("python3 -m dbuffer --help", cwd)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A directory with what dbuffer is built from."""
    place = tmp_path / "clone"
    place.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "dbuffer", place / "dbuffer", ignore=IGNORED)
    return place


def commands(reason: str) -> list[CodeBlock]:
    """Return the page's commands that documents do not run for this reason."""
    blocks = [block for block in blocks_of(PAGE) if block.language == "bash"]
    return [block for block in blocks if block.reason.startswith(reason)]


@IN_SOAKS_ALONE
def test_the_commands_of_the_page_install_dbuffer(environment, clone):
    (offline,) = commands("needs a package index")
    collect = offline.code.replace(" wheel ", " wheel --no-deps ")
    shown = commands("installs packages")
    assert len(shown) == 5
    (installed,) = environment.bin.parent.glob("lib/*/site-packages")
    (clone / "dbuffer" / "added.py").touch()
    for block in shown:
        if "--no-index" in block.code:
            environment.run(collect, clone)
        if is_upgrade := "--force-reinstall" in block.code:
            environment.run("python3 -m pip install dist/*.whl", clone)
            (installed / "dbuffer" / "added.py").unlink()
        for command in block.code.splitlines():
            environment.run(command, clone)
        environment.check(clone.parent)
        assert not is_upgrade or (installed / "dbuffer" / "added.py").exists()
        environment.run("python3 -m pip uninstall --yes dbuffer", clone)


@pytest.mark.parametrize("document", [PAGE, IMAGE], ids=lambda path: path.name)
def test_the_constraint_is_the_version_of_torch_that_pip_knows(document, tmp_path):
    """The build on PyPI calls itself by another one, to which its CUDA's is added."""
    (tmp_path / "torch.py").write_text('__version__ = "2.14.1+cu130"\n')
    packaged = tmp_path / "torch-2.14.1.dist-info"
    packaged.mkdir()
    (packaged / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.14.1\n")
    [(command, _)] = re.findall(r"(python3 -c .*) > (\S*installed.txt)", document.read_text())
    variables = os.environ | {
        "PYTHONPATH": str(tmp_path),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    assert subprocess.check_output(command, shell=True, env=variables) == b"torch==2.14.1\n"


@IN_SOAKS_ALONE
def test_the_commands_of_the_image_add_dbuffer_to_vllm(environment, tmp_path):
    root = tmp_path / "root"

    def inside(text: str) -> str:
        return re.sub(r"(?<![\w:.])/(?=(?:examples|src|wheels|tmp)\b)", f"{root}/", text)

    (root / "tmp").mkdir(parents=True)
    steps = IMAGE.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    for step in steps:
        instruction, _, rest = step.partition(" ")
        if instruction == "COPY" and not rest.startswith("--from="):
            *sources, target = inside(rest).split()
            for name in sources:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, target, ignore=IGNORED)
                else:
                    Path(target).mkdir(exist_ok=True)
                    shutil.copy(ROOT / name, target)
        elif instruction == "RUN":
            environment.run(inside(rest), root)
        else:
            assert not step or instruction in ("#", "ARG", "COPY", "FROM")
    environment.check(tmp_path)


def test_the_page_has_all_extras():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = PAGE.read_text(encoding="utf-8").partition("## Extras")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    shown = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert shown == set(project["optional-dependencies"])
