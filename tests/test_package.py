"""What is shipped: the wheel's content, the public names, the licence, and the texts that make promises about them."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import mlx_dflash

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    for tool in ("build", "hatchling"):
        pytest.importorskip(tool)
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return zipfile.ZipFile(next(folder.glob("*.whl")))


def test_the_wheel_holds_the_pair_and_the_kernel_folder(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    pair = ROOT / "mlx_dflash" / "data" / "pair"
    for file in pair.rglob("*"):
        if file.is_file():
            name = file.relative_to(ROOT).as_posix()
            assert wheel.read(name) == file.read_bytes()
    assert "mlx_dflash/metal_kernels/README.md" in names
    assert "mlx_dflash/data/drafts.json" in names
    tops = {name.split("/")[0] for name in names}
    assert tops == {"mlx_dflash", f"mlx_dflash-{mlx_dflash.__version__}.dist-info"}, "nothing else lands beside it"


def test_the_wheel_states_version_licence_and_command(wheel: zipfile.ZipFile) -> None:
    info = f"mlx_dflash-{mlx_dflash.__version__}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"Version: {mlx_dflash.__version__}\n" in metadata
    assert "License-Expression: Apache-2.0\n" in metadata
    assert "Requires-Python: >=3.10\n" in metadata
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert "mlx-dflash = mlx_dflash.cli.entry:main" in wheel.read(f"{info}/entry_points.txt").decode()


def test_the_public_names_are_those_listed_and_nothing_else() -> None:
    """Read in a fresh process: tests import modules that then appear as attributes of the package."""
    program = "import mlx_dflash\nprint(*(n for n in dir(mlx_dflash) if n[0] != '_'))"
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert set(shown.split()) == set(mlx_dflash.__all__) - {"__version__"}
    for name in mlx_dflash.__all__:
        assert getattr(mlx_dflash, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        _ = mlx_dflash.lod


def test_importing_the_package_loads_no_model_library() -> None:
    """R23: optional and heavy imports wait for their first use, so --version and Ctrl-C answer at once."""
    program = "import mlx_dflash, mlx_dflash.cli.entry, sys\nprint([m for m in ('mlx', 'mlx_lm') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"


def test_lower_bounds_are_read_from_the_project_file() -> None:
    """R23: the run with the oldest dependencies pins what the project promises, and all of it."""
    script = ROOT / "scripts" / "lower_bounds.py"
    pins = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    promised = project.partition("\ndependencies = [")[2].partition("\n]")[0]
    names = set(re.findall(r'^\s*"([a-z-]+)', promised, re.MULTILINE))
    assert {line.partition("==")[0] for line in pins.splitlines()} == names


def test_the_readme_has_its_two_commands_and_ten_lines_that_run() -> None:
    commands = [line for line in README.splitlines() if re.match(r"python3 |scripts/", line)]
    assert commands == [
        'python3 -m venv .venv && .venv/bin/pip install . && .venv/bin/mlx-dflash generate "def fibonacci("',
        "scripts/test.sh",
    ]
    program = README.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in program.splitlines() if line.strip()]) <= 10
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The capital of Norway is Oslo.\nspeculative: ")


def test_texts_link_to_files_that_exist() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "architecture.md", ROOT / "metal_kernels" / "README.md"):
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_the_installed_metadata_agrees_with_the_source() -> None:
    try:
        installed = importlib.metadata.version("mlx-dflash")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed here")
    assert installed == mlx_dflash.__version__
