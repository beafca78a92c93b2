import ast
import importlib
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fcjax
from fcjax import data, results

pytestmark = pytest.mark.usefixtures("quick_compilation")
README = Path(__file__).parents[1] / "README.md"


def small_digits():
    """A few images of MNIST's shape that need no download. The position of a bright bar gives the label."""
    rng = np.random.default_rng(0)

    def draw(size):
        labels = rng.integers(0, 10, size).astype(np.int32)
        images = rng.integers(0, 100, (size, 28, 28, 1)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 3] += 100
        return images, labels

    (train_x, train_y), (test_x, test_y) = draw(4000), draw(200)
    return data.Dataset("mnist", train_x, train_y, test_x, test_y, tuple("0123456789"), "a seed")


def python_snippets(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("README.md", 5, ("best_accuracy", "devices")),
        ("docs/cells.md", 4, (" J", "J less per s")),
        ("docs/design.md", 1, ("bandwidth_hz", "devices", "faster")),
        ("docs/policies.md", 1, ("95% interval", "time_to_accuracy")),
    ],
)
def test_snippets_run_in_order(name, number, words, capsys, monkeypatch, tmp_path):
    digits = small_digits()
    monkeypatch.setattr(data, "load", lambda name: digits)
    monkeypatch.chdir(tmp_path)
    snippets = python_snippets(README.parent / name)
    assert len(snippets) == number
    namespace = {}
    for snippet in snippets:
        exec(compile(snippet, name, "exec"), namespace)
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed
    assert "nan" not in printed


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((README.parent / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(path, capsys, monkeypatch, tmp_path):
    digits = small_digits()
    monkeypatch.setattr(data, "load", lambda name: digits)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path))
    assert "best_accuracy" in capsys.readouterr().out


def test_links_point_to_files():
    for path in (README, *README.parent.glob("*.md"), *(README.parent / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            assert link.startswith("https://") or (path.parent / link).exists(), f"{path.name}: {link}"


def test_guide_lists_every_package():
    text = (README.parent / "CONTRIBUTING.md").read_text()
    for path in (README.parent / "fcjax").iterdir():
        if path.suffix == ".py" or (path / "__init__.py").exists():
            name = f"{path.name}/" if path.is_dir() else path.name
            assert path.name.startswith("__") or f"`{name}`" in text or f"`fcjax/{name}`" in text, path


SCRIPTS = sorted([*(README.parent / "experiments").rglob("*.py"), *(README.parent / "examples").glob("*.py")])
INTERNAL_SCRIPTS = ("benchmarks", "robustness")  # these may use documented names of any module


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_use_only_public_documented_names(path):
    tree = ast.parse(path.read_text())
    modules = {}  # local name -> fcjax module
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name: fcjax for alias in node.names if alias.name == "fcjax"}
            assert not any(alias.name.startswith("fcjax.") for alias in node.names), "use `from fcjax import ...`"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fcjax":
            home = importlib.import_module(node.module)
            for alias in node.names:
                found = getattr(home, alias.name, None) or importlib.import_module(f"{node.module}.{alias.name}")
                is_public = node.module == "fcjax" and alias.name in fcjax.__all__
                assert is_public or set(INTERNAL_SCRIPTS) & set(path.parts) or node.module == "fcjax.cli", alias.name
                assert_documented(alias.name, found)
                if inspect.ismodule(found):
                    modules[alias.asname or alias.name] = found
    for node in ast.walk(tree):
        names = []
        while isinstance(node, ast.Attribute):
            names, node = [node.attr, *names], node.value
        if isinstance(node, ast.Name) and node.id in modules:
            found = modules[node.id]
            for name in names:
                if not inspect.ismodule(found):
                    break
                assert found is not fcjax or name in (*fcjax.__all__, "__version__"), name
                found = getattr(found, name)
                assert_documented(name, found)


def assert_documented(name, found):
    assert not name.startswith("_") or name == "__version__"
    assert inspect.getdoc(found) or not callable(found), f"{name} has no docstring"


@pytest.mark.parametrize("name", fcjax.__all__)
def test_public_names_are_documented(name):
    found = getattr(fcjax, name)
    assert_documented(name, found)
    if not inspect.ismodule(found):
        return
    for inside in getattr(found, "__all__", vars(found)):
        value = getattr(found, inside)
        if not inside.startswith("_") and inspect.isfunction(value) and value.__module__ == found.__name__:
            assert value.__doc__, f"{name}.{inside} has no docstring"


# As Slurm does, it copies the script before it returns: dask-jobqueue deletes its own then.
SBATCH = """#!/bin/sh
for script; do :; done
cp "$script" {copy}
sh {copy} >/dev/null 2>&1 &
echo $! >> {pids}
echo "Submitted batch job $!"
"""


@pytest.mark.slow
def test_slurm_script_with_a_local_sbatch(tmp_path):
    (script,) = python_snippets(README.parent / "docs" / "clusters.md")
    for old, new in (
        (
            "SLURMCluster(cores=32, processes=32",
            'SLURMCluster(scheduler_options={"host": "127.0.0.1"}, cores=2, processes=2',
        ),
        ("scale(jobs=10)", "scale(jobs=1)"),
        ("seeds=1000", "seeds=3, dataset=tiny.dataset(), preset=tiny.experiment, num_devices=6"),
        ("import fcjax\n", "import fcjax, tiny\n"),
    ):
        assert old in script
        script = script.replace(old, new)
    (tmp_path / "slurm.py").write_text(script)
    pids = tmp_path / "pids"
    sbatch = SBATCH.format(pids=pids, copy=tmp_path / "job.sh")
    for name, content in (("sbatch", sbatch), ("scancel", "#!/bin/sh\nkill $@\n")):
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parent / "support"),
    }
    command = [sys.executable, "slurm.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert pids.exists()
    assert results.load(tmp_path / "histories.nc").sizes["run"] == 3
