"""Sphinx configuration. Snippets run on eight CPU devices, like the tests, in JAX's default precision."""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

jax.config.update("jax_num_cpu_devices", 8)

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_ext")]  # snippets import this clone

project = "meshdsl"
author = "the meshdsl maintainers"
copyright = "the meshdsl maintainers"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "public_names",
    "notebooks",
    "gallery",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext"]

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"

html_theme = "furo"
html_title = "meshdsl"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["copy.js"]
html_show_sphinx = False
html_copy_source = False
