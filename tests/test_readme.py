import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_snippets_run_in_order(capsys):
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert snippets
    namespace = {}
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), namespace)
    printed = capsys.readouterr().out
    assert "devices" in printed
    assert "nan" not in printed


def test_files_in_the_table_exist():
    for path in re.findall(r"^\| `([^`]+)` \|", README.read_text(), flags=re.MULTILINE):
        assert (README.parent / path).exists(), path
