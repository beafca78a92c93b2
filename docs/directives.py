"""Directives for pages: `api` documents public names from their docstrings, `commands` shows the help of `fcjax`."""

import inspect
import os
import re
import subprocess
import sys
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import fcjax


class Api(SphinxDirective):
    """Documents names of `fcjax`, one per line: types and functions, or modules with all that they offer."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes("\n\n".join(map(_entry, self.content)), allow_section_headings=True)


def _entry(name: str) -> str:
    found = getattr(fcjax, name)
    if not inspect.ismodule(found):
        return _rst(_autodoc(f"fcjax.{name}", found))
    offered = getattr(found, "__all__", None) or [
        inside for inside, value in vars(found).items() if getattr(value, "__module__", None) == found.__name__
    ]
    entries = [
        _autodoc(f"fcjax.{name}.{inside}", getattr(found, inside))
        for inside in offered
        if not inside.startswith("_") and inspect.getdoc(getattr(found, inside))
    ]
    about = "\n".join(readable((inspect.getdoc(found) or "").splitlines()))
    return f"## fcjax.{name}\n\n{_rst(f'.. py:module:: fcjax.{name}', about, *entries)}"


def _autodoc(name: str, found: object) -> str:
    if isinstance(found, type):
        # The docstring lists the fields of a type; what else it offers has docstrings of its own.
        offered = [
            inside
            for inside, value in vars(found).items()
            if not inside.startswith("_")
            and (isinstance(value, property) or inspect.isfunction(value))
            and inside not in getattr(found, "__dataclass_fields__", ())
        ]
        return f".. autoclass:: {name}" + (f"\n   :members: {', '.join(offered)}" if offered else "")
    return f".. autofunction:: {name}" if inspect.isroutine(found) else ""


def _rst(*parts: str) -> str:
    return "```{eval-rst}\n" + "\n\n".join(parts) + "\n```"


def readable(lines: list[str]) -> list[str]:
    """Returns a docstring as reStructuredText: indented paragraphs are code, and bars elsewhere are just bars."""
    made: list[str] = []
    is_code, last = False, ""  # the last line that is not empty
    for line in lines:
        indented = line.startswith("    ")
        if indented and made and not made[-1] and not is_code and last and not last.startswith(" "):
            made += ["::", ""]
            is_code = True
        elif line and not indented:
            is_code = False
        made.append(line if is_code else line.replace("|", r"\|"))
        last = line or last
    return made


def _make_readable(app: Sphinx, what: str, name: str, found: Any, options: object, lines: list[str]) -> None:
    if what == "class" and "Attributes:" in lines:
        start = lines.index("Attributes:")
        lines[start:] = fields(found, lines[start + 1 :])
    lines[:] = readable(lines)


def fields(cls: Any, lines: list[str]) -> list[str]:
    """Returns the section "Attributes" of a docstring as a table; a field's text may begin with its shape."""
    text = "\n".join(lines)
    found = re.findall(r"^ {2}(\w+): (.*(?:\n {4}.*)*)", text, flags=re.MULTILINE)
    table = [".. list-table::", "   :header-rows: 1", "", "   * - field", "     - shape", "     - unit and meaning"]
    table.append("     - default")
    for name, meaning in found:
        shape, rest = re.fullmatch(r"((?:\([M,\w]*\)(?: or )?)*) *(.*)", " ".join(meaning.split())).groups()
        cells = f"``{name}``", f"``{shape}``" if shape else "", rest, _default(cls, name)
        table += [f"   {'* -' if i == 0 else '  -'} {cell}" for i, cell in enumerate(cells)]
    return table


def _default(cls: Any, name: str) -> str:
    parameter = inspect.signature(cls).parameters.get(name)
    if parameter is None or parameter.default is inspect.Parameter.empty:
        return ""
    value = parameter.default
    return f"``{value:g}``" if isinstance(value, float) else f"``{getattr(value, '__name__', value)!s}``"


_ARRAY_LIKE = (  # as autodoc spells it
    r"TypeAliasForwardRef\('ArrayLike'\)"
    r"|\S*Array \| \S*ndarray \| \S*bool \| \S*number \| bool \| int \| float \| complex"
)


def _short_signature(
    app: Sphinx, what: str, name: str, found: Any, options: object, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """Omits the signatures of types, whose fields are in a table, and shortens annotations."""
    if what == "class" and "Attributes:" in (found.__doc__ or ""):
        return "", None
    shorter = [part and re.sub(_ARRAY_LIKE, "ArrayLike", part) for part in (signature, returned)]
    return (shorter[0] or "", shorter[1]) if signature is not None else None


class Commands(SphinxDirective):
    """Shows the help of `fcjax` and of each of its commands."""

    def run(self) -> list[nodes.Node]:
        top = _help()
        commands = re.search(r"\{([\w,-]+)\}", top)
        assert commands, top
        texts = {"fcjax": top} | {f"fcjax {name}": _help(name) for name in commands[1].split(",")}
        parts = (f"## {name}\n\n```text\n{text.rstrip()}\n```" for name, text in texts.items())
        return self.parse_text_to_nodes("\n\n".join(parts), allow_section_headings=True)


def _help(*command: str) -> str:
    code = "import sys; from fcjax.cli import main; sys.exit(main())"
    environment = os.environ | {"COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", code, *command, "--help"], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("api", Api)
    app.add_directive("commands", Commands)
    app.connect("autodoc-process-docstring", _make_readable, priority=400)  # before napoleon's
    app.connect("autodoc-process-signature", _short_signature)
    return {"parallel_read_safe": True}
