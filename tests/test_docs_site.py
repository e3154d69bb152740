"""The site without a browser: links and their anchors, alt texts, and the contrast of our own colours (WCAG 2.2)."""

from __future__ import annotations

import codeop
import re
from itertools import product
from pathlib import Path

import pytest

from meshdsl.cost.report import html
from meshdsl.errors import markup
from meshdsl.tools.pictures import picture
from tests.pages import PageParser

ROOT = Path(__file__).parent.parent
FOLDERS = [ROOT, *(ROOT / "docs" / folder for folder in (".", "design", "notes"))]
PAGES = sorted(page.resolve() for folder in FOLDERS for page in folder.glob("*.md"))
TEXT, MARK = 4.5, 3.0  # success criteria 1.4.3 (text) and 1.4.11 (what a reader has to tell apart)


def anchors(markdown: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"(?m)^#+ (.+)$", re.sub(r"(?ms)^```.*?^```$", "", markdown))
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_site_anchors_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s#]*)#([^)\s]+)\)", page.read_text(encoding="utf-8"))
    broken = []
    for file, anchor in links:
        target = page.parent / file if file else page
        if "://" not in file and anchor not in anchors(target.read_text(encoding="utf-8")):
            broken.append(f"{file}#{anchor}")
    assert not broken, f"{page.name} links to headings that do not exist: {', '.join(broken)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_site_images_have_alt_texts(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    short = [image for alt, image in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", text) if len(alt.split()) < 4]
    assert not short, f"say what is seen in {', '.join(short)}"
    assert "<img" not in text


def entries(page: Path) -> list[str]:
    """The entries of a page's toctrees."""
    trees = re.findall(r"(?ms)^```\{toctree\}(.*?)^```", page.read_text(encoding="utf-8"))
    return re.findall(r"(?m)^([\w/*]+)$", "\n".join(trees))


def test_site_pages_are_in_the_sidebar() -> None:
    listed = {entry for page in (ROOT / "docs").glob("*.md") for entry in entries(page)}
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "notes").glob("*.md")]
    assert {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in pages} - {"index"} <= listed


def test_site_sidebar_is_short() -> None:
    assert len(entries(ROOT / "docs" / "index.md")) <= 15


def words(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").split())


GUIDES = sorted(
    {*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / f"{entry}.md" for entry in entries(ROOT / "docs/internals.md")}
)


@pytest.mark.parametrize("page", GUIDES, ids=lambda path: path.stem)
def test_guides_are_short(page: Path) -> None:
    assert words(page) <= 1200


def test_guides_and_reference_are_short() -> None:
    assert sum(map(words, GUIDES)) <= 34_000


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 135


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_site_sessions_can_be_pasted(page: Path) -> None:
    """As the copy button gives them: an empty line after each statement of several lines, and none inside one."""
    for example in PageParser().get_examples(page.read_text(encoding="utf-8")):
        lines = example.source.splitlines()
        typed = [*lines, ""] if len(lines) > 1 else lines
        ends = [i for i in range(len(typed)) if codeop.compile_command("\n".join(typed[: i + 1])) is not None]
        assert ends and all(not line.strip() for line in typed[ends[0] + 1 :]), f"the prompt ends before: {lines}"


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    parts = (int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(a: str, b: str) -> float:
    """The ratio of WCAG: 1 for equal colours, 21 for black on white."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def themes(css: str) -> list[dict[str, str]]:
    """The custom properties of a style sheet, in light and in dark: what a dark block redefines."""
    light: dict[str, str] = {}
    dark: dict[str, str] = {}
    for name, colour in re.findall(r"--([\w-]+): (#\w+)", css):
        (dark if name in light else light).setdefault(name, colour)
    return [light, light | dark]


def test_contrast_of_black_on_white() -> None:
    assert contrast("#000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#fff") == pytest.approx(4.48, abs=0.01)


def test_contrast_of_the_site() -> None:
    for theme in themes((ROOT / "docs" / "_static" / "site.css").read_text(encoding="utf-8")):
        for text, ground in product(("site-ink", "site-soft", "site-accent"), ("site-ground", "site-card")):
            assert contrast(theme[text], theme[ground]) >= TEXT, (text, ground, theme)


def test_contrast_of_pictures_and_notebooks() -> None:
    for i in (0, 1):
        texts = [markup.INK, markup.SOFT, *markup.AXIS_COLOURS]
        assert all(contrast(pair[i], markup.GROUND[i]) >= TEXT for pair in texts)
        assert all(contrast(markup.INK[i], pair[i]) >= TEXT for pair in picture.BLOCKS)


def test_contrast_of_reports() -> None:
    for theme in themes(html.STYLE):
        for text, ground in product(("ink", "soft", "accent"), ("ground", "panel")):
            assert contrast(theme[text], theme[ground]) >= TEXT, (text, ground, theme)
        for bar in (f"part-{i}" for i in range(4)):
            assert contrast("#fff", theme[bar]) >= TEXT, f"percentages stand in white on {bar}"
            assert contrast(theme[bar], theme["ground"]) >= MARK, bar
