import argparse
import ast
import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import fcjax
from fcjax import cli, data, results

pytestmark = pytest.mark.usefixtures("quick_compilation")
README = Path(__file__).parents[1] / "README.md"


def small_digits(num_train=4000):
    """A few images of MNIST's shape that need no download. The position of a bright bar gives the label."""
    rng = np.random.default_rng(0)

    def draw(size):
        labels = rng.integers(0, 10, size).astype(np.int32)
        images = rng.integers(0, 100, (size, 28, 28, 1)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 3] += 100
        return images, labels

    (train_x, train_y), (test_x, test_y) = draw(num_train), draw(200)
    return data.Dataset("mnist", train_x, train_y, test_x, test_y, tuple("0123456789"), "a seed")


ROOT = README.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "docs").rglob("*.ipynb")])
WORDS = {  # that the snippets of a page print
    "README.md": ("best_accuracy", "devices"),
    "docs/cells.md": (" J", "J less per s"),
    "docs/design.md": ("bandwidth_hz", "devices", "faster"),
    "docs/policies.md": ("95% interval", "time_to_accuracy"),
    "docs/concepts/units.md": ("in total", "Hz for one device"),
    "docs/howto/notebook.md": ("fraction of the bandwidth",),
}


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def text_of(path):
    """Returns a page as Markdown; of a notebook, the cells that are not code."""
    if path.suffix == ".md":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def python_snippets(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(), flags=re.DOTALL)


def with_snippets():
    """Returns all pages with Python code but that of the cluster, which has its own test."""
    return [path for path in PAGES if "```py" in text_of(path) and path.name != "clusters.md"]


@pytest.mark.slow
@pytest.mark.parametrize("path", with_snippets(), ids=name_of)
def test_snippets_run_in_order(path, capsys, monkeypatch, tmp_path):
    digits = small_digits()
    monkeypatch.setattr(data, "load", lambda name: digits)
    monkeypatch.chdir(tmp_path)
    snippets = python_snippets(path)
    assert len(snippets) == text_of(path).count("```py")
    namespace = {}
    for snippet in snippets:
        exec(compile(snippet, str(path), "exec"), namespace)
    printed = capsys.readouterr().out
    for word in WORDS.get(name_of(path), ()):
        assert word in printed
    assert "nan" not in printed


def test_pages_with_known_output_have_snippets():
    assert set(WORDS) <= {name_of(path) for path in with_snippets()}


class ParsedError(Exception):
    """Ends a command once its arguments have been parsed."""


def commands():
    """Yields (page, command) for the commands of fcjax in all pages, in blocks of shell code and in the text."""
    for path in PAGES:
        text = text_of(path)
        blocks = re.findall(r"^ *```sh\n(.*?)```", text, flags=re.DOTALL | re.MULTILINE)
        lines = [part for block in blocks for line in block.splitlines() for part in line.split(" && ")]
        inline = re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?```", "", text, flags=re.DOTALL | re.MULTILINE))
        for line in (*lines, *(" ".join(span.split()) for span in inline)):
            command = re.sub(r"^(\S*=\S* |taskset -c 0 )*(\.venv/bin/)?", "", line.strip())
            if re.match(r"fcjax [a-z]|python experiments/\S+\.py( |$)", command) and "..." not in command:
                yield pytest.param(command, id=f"{name_of(path)}: {command}")


@pytest.mark.parametrize("command", list(commands()))
def test_commands_of_pages_parse(command, monkeypatch):
    program, *arguments = shlex.split(command, comments=True)
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_end(parser, *given, **options):
        parsed = parse(parser, *given, **options)
        if parser.prog == "fcjax":  # it has found the command, whose own arguments come next
            return parsed
        assert not parsed[1], f"unknown arguments {parsed[1]}"
        raise ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_end)
    if program == "fcjax":
        with pytest.raises(ParsedError):
            cli.main(arguments)
        return
    script = ROOT / arguments[0]
    monkeypatch.setattr(sys, "argv", [str(script), *arguments[1:]])
    monkeypatch.syspath_prepend(str(script.parent))
    with pytest.raises(ParsedError):
        runpy.run_path(str(script), run_name="__main__")


TUTORIAL = ROOT / "docs" / "tutorial.ipynb"
SMALL = """
import sys
import jax
jax.config.update("jax_disable_most_optimizations", True)
sys.path.insert(0, {tests!r})
from test_readme import small_digits
from fcjax import data
from fcjax.sweeps import executor
digits = small_digits(30000)  # enough for unequal devices
data.load = lambda name: digits
executor.num_cores = lambda: 1
"""


@pytest.mark.slow
def test_tutorial_in_short():
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    book = nbformat.read(TUTORIAL, as_version=4)
    (parameters,) = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ()))
    short = "budget_s, design_seeds, test_seeds = 4, range(2), range(100, 102)"
    names = re.findall(r"\w+(?=(?:, \w+)* = )", parameters.source)
    assert set(names) == {"budget_s", "design_seeds", "test_seeds"}
    parameters.source = short
    book.cells.insert(0, nbformat.v4.new_code_cell(SMALL.format(tests=str(Path(__file__).parent))))
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute()
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert printed.count("best_accuracy, prompt - fc") == 2
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 3


def test_tutorial_is_committed_with_its_outputs():
    cells = [cell for cell in json.loads(TUTORIAL.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not any(output.get("name") == "stderr" or output["output_type"] == "error" for output in outputs)
    assert any("prompt - fc: +" in "".join(output.get("text", ())) for output in outputs)


def test_reference_has_every_public_name():
    pages = (ROOT / "docs" / "reference").glob("*.md")
    blocks = [block for page in pages for block in re.findall(r"```\{api\}\n(.*?)```", page.read_text(), re.DOTALL)]
    assert sorted(" ".join(blocks).split()) == sorted(fcjax.__all__)


def test_contents_list_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    listed = re.findall(
        r"^(?:\w+ <)?([\w./]+)>?$", "".join(re.findall(r"```\{toctree\}(.*?)```", index, re.DOTALL)), re.M
    )
    pages = {(ROOT / "docs" / name).resolve() for name in listed}
    assert pages >= {path.with_suffix("") for path in PAGES if path.name != "index.md"}


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((README.parent / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run(path, capsys, monkeypatch, tmp_path):
    digits = small_digits()
    monkeypatch.setattr(data, "load", lambda name: digits)
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path))
    assert "best_accuracy" in capsys.readouterr().out


def test_links_point_to_files():
    for path in PAGES:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text_of(path)):
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
