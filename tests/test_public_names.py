"""Every public name has a docstring, and is in the reference exactly once."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import meshdsl as md
from meshdsl.errors import detours

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [
    DOCS.parent / "README.md",
    DOCS.parent / "CONTRIBUTING.md",
    *sorted(DOCS.glob("*.md")),
    *sorted(DOCS.glob("design/*.md")),
    *sorted(DOCS.glob("notes/*.md")),
]
PLANNED: set[str] = set()  # what README.md lists among what is missing


def _load_families():
    spec = importlib.util.spec_from_file_location("families", DOCS / "_ext" / "families.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FAMILIES = _load_families()
REFERENCE = [name for names in FAMILIES.families().values() for name in names]


@pytest.mark.parametrize("name", [*REFERENCE, *md._MODULES])
def test_public_names_have_a_docstring(name: str):
    value = FAMILIES.documented(name)
    text = vars(value).get("__doc__") if inspect.isclass(value) else getattr(value, "__doc__", None)
    assert text and text.strip(), f"md.{name} has no docstring of its own"


@pytest.mark.parametrize("name", [name for name in REFERENCE if callable(FAMILIES.documented(name))])
def test_public_names_have_an_example(name: str):
    value = FAMILIES.documented(name)
    text = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    assert text and ">>>" in text, f"md.{name} has no example in its docstring"


def test_docstrings_name_functions_that_jax_has():
    for name in REFERENCE:
        for path in re.findall(r"`((?:jnp|jax)\.[\w.]+)`", FAMILIES.documented(name).__doc__ or ""):
            found = {"jnp": jax.numpy, "jax": jax}[path.partition(".")[0]]
            for part in path.split(".")[1:]:
                found = getattr(found, part, None) or importlib.import_module(f"{found.__name__}.{part}")


def test_reference_has_every_public_name_once():
    assert len(REFERENCE) == len(set(REFERENCE))
    assert {name.partition(".")[0] for name in REFERENCE} == set(md.__all__)


def test_reference_families_have_titles():
    assert not set(md._HOMES) - set(FAMILIES.TITLES), "give these homes a title in docs/_ext/families.py"


def test_reference_page_is_generated():
    assert "{public-names}" in (DOCS / "reference.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(DOCS.parent)))
def test_docs_pages_mention_only_existing_names(page: Path):
    named = set(re.findall(r"\bmd\.([A-Za-z_]\w*)", page.read_text(encoding="utf-8")))
    missing = named - {*md.__all__, *md._UNLISTED} - PLANNED
    assert not missing, f"there is no {', '.join(sorted(f'md.{name}' for name in missing))}"


def test_tensor_has_operators_after_import():
    script = "import meshdsl as md; print((1 + md.tensor([1.0, 2.0], 'io') * 2).numpy())"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout) == (0, "[3. 5.]\n"), run.stderr


def test_public_names_exclude_planned_names():
    assert not PLANNED & set(md.__all__), "it is there now: say so in README.md"


@pytest.mark.parametrize(("name", "way_out"), {
    "concatenate": "use md.concat", "log_sigmoid": "use -md.softplus", "psum": "the layout decides what is sent",
    "celu": "md.map(jax.nn.celu, x)", "xlogy": "md.map(jax.scipy.special.xlogy, x)", "sinc": "md.local(jnp.sinc, x",
    "glu": "md.local(jax.nn.glu, x", "arctan": "md.atan", "softmx": "did you mean md.softmax", "frobnicate": "dir(md)",
    "matmul": "md.einsum(x, y, out=dims)", "layer_norm": "md.nn.layer_norm", "heaviside": "md.map(jnp.heaviside, x)",
    "unique": "no size before it runs", "svd": "md.linalg.svd",
}.items())  # fmt: skip
def test_a_missing_name_says_what_to_write(name: str, way_out: str) -> None:
    with pytest.raises(AttributeError, match=f"(?s)no name '{name}'.*{re.escape(way_out)}"):
        getattr(md, name)
    assert not hasattr(md, name)


def test_what_to_write_instead_exists() -> None:
    for name, way_out in detours.INSTEAD.items():
        assert not hasattr(md, name), name
        for path in re.findall(r"\bmd\.([\w.]+\w)", way_out):
            FAMILIES.documented(path)


def test_version_is_the_projects() -> None:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == md.__version__


def _load_parameters():
    spec = importlib.util.spec_from_file_location("parameters", DOCS / "_ext" / "parameters.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.parameters


PARAMETERS = _load_parameters()
FUNCTIONS = [n for n in REFERENCE if callable(v := FAMILIES.documented(n)) and not inspect.isclass(v)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_optional_parameters_are_explained(name: str):
    """By a sentence of the function's docstring, or of its family's: the table of its page shows it."""
    rows = PARAMETERS(FAMILIES.documented(name))
    unclear = [row.name for row in rows if row.default is not None and not row.meaning]
    assert not unclear, f"the docstring of md.{name} mentions no `{'`, no `'.join(unclear)}`"


def test_parameters_are_those_of_signature_and_docstring():
    def f(x: int, *xs: str, over: str | None = None, _private: int = 0, scale=1.5, eps: float = 0.1, key=None, q=max):
        """Scales x. Its `scale` is a number; `over` too. Raises `ShapeError` for `over` alone.

        >>> "`key` in a session says nothing"

            y = x / (d + eps)
        """

    assert [tuple(row) for row in PARAMETERS(f)] == [
        ("x", "int", None, "Scales x."),
        ("*xs", "str", None, ""),
        ("over", "str | None", "None", "Its `scale` is a number; `over` too."),
        ("scale", "", "1.5", "Its `scale` is a number; `over` too."),
        ("eps", "float", "0.1", "`y = x / (d + eps)`"),
        ("key", "", "None", ""),
        ("q", "", "max", ""),
    ]


def test_second_names_are_the_same_functions():
    assert (md.gather, md.scatter_add, md.remat) == (md.take, md.put_add, md.checkpoint)
    for module in (md.hub, md.compilers):
        for name in module.__all__:
            assert getattr(module, name) is getattr(md, name), name
