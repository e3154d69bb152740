"""Runs the listings of a Markdown page, in order, in one folder and one namespace.

- A Python session (`>>>`) runs as a doctest. In printed programs, `<stdin>` is the file of a listing's lines.
- In a `console` listing, each `$ meshdsl ...` runs, and must print what the page shows below it: stdout, then the
  errors on stderr. `$ echo $?` prints the exit code of the last command. Other commands do not run, and show no output.
- A `toml` or `python` listing whose first line is `# NAME.toml` or `# NAME.py` is written to this file of the folder.

A listing after `<!-- not run: REASON -->` is left alone. A `...` in expected output stands for any text.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import sys
from pathlib import Path

from meshdsl.tools import cli

__all__ = ["PageChecker", "PageParser", "run_page", "unchecked"]

ROOT = Path(__file__).parent.parent
_FENCE = re.compile(r"(?ms)^(?P<skip><!-- not run: [^\n]+ -->\n+)?```(?P<kind>[^\n]*)\n(?P<body>.*?)^```$")
_FILE = re.compile(r"# ([\w.]+\.(?:toml|py))\n")
_OURS = re.compile(r"\$ (?:\.venv/bin/)?(meshdsl .*|echo \$\?)")


class PageParser(doctest.DocTestParser):
    """Turns the listings of a page into examples."""

    def parse(self, string: str, name: str = "<string>") -> list[str | doctest.Example]:
        sessions = re.sub(r"(?m)^[ \t]*(```|:::).*$", "", _FENCE.sub(_as_session, string))  # also fences in lists
        return super().parse(sessions, name)


def _as_session(found: re.Match[str]) -> str:
    kind, body = found["kind"].strip("{}"), found["body"]
    file = _FILE.match(body)
    if found["skip"]:
        text = ""
    elif kind in ("toml", "python") and file is not None:
        text = f">>> write_file({file[1]!r}, {body!r})\n"
    elif kind == "console":
        text = "\n".join(_commands(body))
    else:
        text = body if ">>>" in body else ""
    lines = found[0].count("\n") - text.count("\n")  # failures are reported with the page's own line numbers, nearly
    return text + "\n" * max(lines, 1)


def _commands(body: str) -> list[str]:
    lines = []
    for line in body.replace("\\\n", " ").splitlines():
        ours = _OURS.fullmatch(line)
        if ours is not None:
            lines.append(f">>> shell({ours[1]!r})")
        elif line.startswith("$ "):
            lines.append("")  # the end of the output before it
        else:
            lines.append(line or "<BLANKLINE>")
    return lines


class PageChecker(doctest.OutputChecker):
    """Compares output; a listing's file is `<stdin>`, as at the prompt of Python."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(_at_prompt(want), _at_prompt(got), optionflags)

    def output_difference(self, example: doctest.Example, got: str, optionflags: int) -> str:
        return super().output_difference(example, _at_prompt(got), optionflags)


def _at_prompt(text: str) -> str:
    return re.sub(r"<doctest [^>]*>", "<stdin>", text)


class _Shell:
    """Runs `meshdsl` in this process. Progress lines, which a terminal overwrites, are left out."""

    def __init__(self) -> None:
        self.code = 0

    def __call__(self, line: str) -> None:
        if line == "echo $?":
            return print(self.code)
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            self.code = cli.main(shlex.split(line)[1:])
        shown = [text for text in errors.getvalue().splitlines() if not text.startswith("train ")]
        return print(*shown, sep="\n") if shown and self.code else None


def run_page(page: Path, folder: Path) -> doctest.TestResults:
    """Run the listings of a page in `folder`, where `models` is the repository's folder; failures are printed."""
    if not (folder / "models").exists():
        (folder / "models").symlink_to(ROOT / "models")
    namespace = {"__name__": "__main__", "shell": _Shell(), "write_file": _write_file}
    test = PageParser().get_doctest(page.read_text(encoding="utf-8"), namespace, page.name, str(page), 0)
    runner = doctest.DocTestRunner(checker=PageChecker(), optionflags=doctest.ELLIPSIS)
    path = list(sys.path)
    before = os.getcwd()
    os.chdir(folder)
    try:
        return runner.run(test)
    finally:
        os.chdir(before)
        sys.path[:] = path


def _write_file(name: str, text: str) -> None:
    Path(name).write_text(text, encoding="utf-8")


def unchecked(markdown: str) -> list[str]:
    """The listings of Python and shell output that nothing runs, each by its first line."""
    missed = []
    for found in _FENCE.finditer(markdown):
        kind, body = found["kind"].strip("{}"), found["body"]
        python = kind in ("python", "py", "pycon", "doctest") and ">>>" not in body and not _FILE.match(body)
        foreign = [line for line in body.splitlines() if line.startswith("$ ") and not _OURS.fullmatch(line)]
        shell = kind == "console" and bool(foreign) and len(foreign) < len(body.splitlines())
        if not found["skip"] and (python or (shell and not _OURS.search(body))):
            missed.append(body.strip().partition("\n")[0])
    return missed
