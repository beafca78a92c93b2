import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fcjax import data, results

pytestmark = pytest.mark.usefixtures("quick_compilation")
README = Path(__file__).parents[1] / "README.md"


def small_digits():
    """Images in the shape of MNIST's, few and without a download: a bright bar whose place is the label."""
    rng = np.random.default_rng(0)

    def draw(size):
        labels = rng.integers(0, 10, size).astype(np.int32)
        images = rng.integers(0, 100, (size, 28, 28, 1)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[2 * label : 2 * label + 3] += 100
        return images, labels

    (train_x, train_y), (test_x, test_y) = draw(4000), draw(200)
    return data.Dataset("mnist", train_x, train_y, test_x, test_y, tuple("0123456789"), "a seed")


def python_snippets():
    return re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.slow
def test_snippets_run_in_order(capsys, monkeypatch):
    digits = small_digits()
    monkeypatch.setattr(data, "load", lambda name: digits)
    snippets = [snippet for snippet in python_snippets() if "slurm.py" not in snippet]
    assert len(snippets) == 6
    namespace = {}
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), namespace)
    printed = capsys.readouterr().out
    assert "best_accuracy" in printed
    assert "devices" in printed
    assert "nan" not in printed


def test_files_in_the_table_exist():
    text = README.read_text()
    for path in re.findall(r"^\| `([^`]+)` \|", text, flags=re.MULTILINE) + re.findall(r"!\[.*?\]\((.*?)\)", text):
        assert (README.parent / path).exists(), path


def test_the_table_is_in_the_order_of_imports():
    """Modules import only what is listed above them."""
    listed = re.findall(r"^\| `fcjax/(\w+)(?:\.py|/)` \|", README.read_text(), flags=re.MULTILINE)
    folder = README.parent / "fcjax"
    assert sorted(listed) == sorted(p.stem for p in folder.iterdir() if p.stem[:2] != "__" and p.suffix in ("", ".py"))
    for position, name in enumerate(listed):
        path = folder / f"{name}.py" if (folder / f"{name}.py").exists() else folder / name / "__init__.py"
        source = path.read_text()
        imported = set(re.findall(r"^from fcjax\.(\w+)", source, flags=re.MULTILINE))
        for names in re.findall(r"^from fcjax import (.+)$", source, flags=re.MULTILINE):
            imported |= set(names.split(", "))
        later = imported & set(listed[position + 1 :])
        assert not later, f"{name} imports {later}"


SBATCH = """#!/bin/sh
for script; do :; done
sh "$script" >/dev/null 2>&1 &
echo $! >> {pids}
echo "Submitted batch job $!"
"""


@pytest.mark.slow
def test_the_slurm_script_with_an_sbatch_that_runs_jobs_here(tmp_path):
    (script,) = [snippet for snippet in python_snippets() if "slurm.py" in snippet]
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
    for name, content in (("sbatch", SBATCH.format(pids=pids)), ("scancel", "#!/bin/sh\nkill $@\n")):
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
