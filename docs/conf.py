"""The documentation site: `sphinx-build -W --keep-going -c docs . out/docs` writes it to out/docs/.

The source folder is the repository itself, so that the links and pictures of a page work both here and on GitHub.
"""

import sys
from pathlib import Path

import fcjax

sys.path.insert(0, str(Path(__file__).parent))

project, author, release = "fcjax", "the authors of fcjax", fcjax.__version__
html_title = f"fcjax {release}"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "directives"]
html_theme = "furo"
html_extra_path = ["redirect"]  # index.html
html_theme_options = {"light_css_variables": {"code-font-size": "75%"}}  # 100 characters fit
html_show_copyright = False

root_doc = "docs/index"
include_patterns = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**", "experiments/results/paper/README.md"]
exclude_patterns = [".venv", ".git", "out", "build"]

myst_heading_anchors = 3
nb_execution_mode = "off"  # the tutorial is committed with its outputs
nb_merge_streams = True

smartquotes_action = "D"  # dashes only: quoted names are Python strings
default_role = "py:obj"
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_type_aliases = {"ArrayLike": "ArrayLike", "Params": "Params"}
python_maximum_signature_line_length = 100
