"""The words of the field: no text of the project uses the house words that they replaced."""

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

NAME = r"(?<![`\"'/=.-]){}(?![`\"'/=:])"
"""A word as prose. In quotes or next to a slash it is a name of HTTP, a setting or a folder, such
as the folder `pictures/` of a gallery or the field `crowds`; these stay."""

WORDS = {
    "worker, search thread": r"\blanes?\b",
    "next to, compared with": r"\bbeside\b",
    "again, rebuilt": r"\banew\b|\bmade again\b",
    "fix": r"\bmend(s|ed|ing)?\b",
    "cancelled": r"\babandoned\b|\bnobody waits\b",
    "bulk limit, semaphore, cluster": NAME.format(r"\bcrowds?\b"),
    "priority": r"\bpatient(ly)?\b",
    "reports, returns, is called with": r"\b(told|tells)\b",
    "reports, states, means": r"\bsa(ys|id)\b",
    "is stored in": r"\blies\b",
    "is in, represents": r"\bstands (in|for|beside|there|at|on)\b",
    "number of, up to": r"\bso many\b",
    "lowercase": r"\bsmall letters\b",
    "omit": r"\b(leave|leaves|left|leaving) (out|away)\b",
    "depends on": r"\bhangs on\b",
    "is deleted": r"\bgoes\b(?! (through|to|from|into|via|with|up|down|beyond|back|past|over)\b)",
    "must not, is not a": r"(?<!there )\bis no (text|image|number|name|key|list|file|object)\b",
    "load balancer": r"\bway in\b",
    "running": r"\bunder way\b",
    "exits with": r"\bends with [012]\b",
    "package": r"\brooms?\b",
    "automatically": r"\bby itself\b",
    "image, photo": NAME.format(r"\b(pictures?|photographs?)\b"),
    "lease: acquire, release": r"\b(gives?|given|gave) back\b",
}
"""What to write, and the pattern of what it replaces."""

SKIPPED = (
    "tests/test_words.py",
    "docs/decisions/",  # of their time
    "service/galleries/feedback.py",  # `picture` is a column of stored feedback
)
KINDS = {
    ".py",
    ".js",
    ".html",
    ".css",
    ".md",
    ".ipynb",
    ".toml",
    ".yml",
    ".yaml",
    ".cff",
    ".service",
}


@cache
def texts() -> dict[str, str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip(f"needs the git checkout: {listed.stderr.strip()}")
    return {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in listed.stdout.splitlines()
        if Path(name).suffix in KINDS and (ROOT / name).is_file() and not name.startswith(SKIPPED)
    }


def found(pattern: str) -> Iterator[str]:
    for name, text in texts().items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{line}: {match[0]}"


@pytest.mark.parametrize("word", WORDS)
def test_no_text_uses_a_house_word(word: str) -> None:
    places = list(found(WORDS[word]))
    by_file = Counter(place.split(":")[0] for place in places)
    assert not places, f"Write {word}; {len(places)} in {len(by_file)} files:\n" + "\n".join(
        places[:20]
    )


def test_no_text_has_the_marks_of_an_unfinished_merge() -> None:
    marks = re.compile(r"^(<{7} .*|={7}|>{7} .*)$", re.MULTILINE)
    assert {name: marks.findall(text) for name, text in texts().items() if marks.search(text)} == {}


DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "AGENTS.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "decisions"),
    *sorted((ROOT / "examples").glob("*.ipynb")),
]
MOST_WORDS = 30
SHOP = [
    DOCS / f"{name}.md"
    for name in (
        "tutorial", "own-shop", "nightly", "page", "own-vectors", "words", "boxes", "models",
        "troubleshooting", "guarantee",
    )
] + [ROOT / "examples/quickstart.ipynb"]  # fmt: skip
"""The pages for a shop: one idea in a sentence, and no word of a laboratory."""
MOST_WORDS_FOR_A_SHOP = 25
LABORATORY = re.compile(r"\b(?:trunk|head|fold|alpha)s?\b|R@1\b", re.IGNORECASE)


def text_of(page: Path) -> str:
    """The text of a page; of a notebook, that of its cells without code."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".ipynb":
        return text
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"]
    return "\n\n".join("".join(cell["source"]) for cell in cells)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page: without code, formulas and addresses; cells and items end them."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$|\]\([^)]*\)", "", text, flags=re.DOTALL)
    lines = [
        "" if line.startswith("    ") and not line.lstrip().startswith(("-", "*")) else line
        for line in text.splitlines()
    ]
    for part in re.split(r"\n\s*\n|\n(?=\s*[-*] )|\n#|\|", "\n".join(lines)):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(part.split()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_sentence_of_a_page_is_too_long(page: Path) -> None:
    most = MOST_WORDS_FOR_A_SHOP if page in SHOP else MOST_WORDS
    long = [
        sentence
        for sentence in sentences(text_of(page))
        if len([word for word in sentence.split() if re.search(r"\w", word)]) > most
    ]
    assert not long, f"More than {most} words:\n" + "\n".join(long)


@pytest.mark.parametrize("page", SHOP, ids=lambda page: page.name)
def test_a_page_for_a_shop_has_no_word_of_a_laboratory(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if LABORATORY.search(line)]
