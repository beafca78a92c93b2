import re
from pathlib import Path

import numpy as np
import pytest

from fcjax import data

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


def test_snippets_run_in_order(capsys, monkeypatch):
    digits = small_digits()
    monkeypatch.setattr(data, "load", lambda name: digits)
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
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
    assert sorted(listed) == sorted(p.stem for p in folder.iterdir() if p.stem[0] != "_" and p.suffix in ("", ".py"))
    for position, name in enumerate(listed):
        path = folder / f"{name}.py" if (folder / f"{name}.py").exists() else folder / name / "__init__.py"
        source = path.read_text()
        imported = set(re.findall(r"^from fcjax\.(\w+)", source, flags=re.MULTILINE))
        for names in re.findall(r"^from fcjax import (.+)$", source, flags=re.MULTILINE):
            imported |= set(names.split(", "))
        later = imported & set(listed[position + 1 :])
        assert not later, f"{name} imports {later}"
