"""The figures of a sentence, and those of the tests and scripts that it cites."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.pages import ROOT, prose

CITED = re.compile(
    r"`(?:[A-Z_]+=\S+ )*(pytest|python -m pytest|python -m(?= (?:benchmarks|studies|tools|tests)\.)) ([^`]+)`"
)
WRITTEN = re.compile(
    r"(?<![\w.^/-])[-+−]?(\d[\d,]*(?:\.\d+)?|\.\d+)(e[-−]?\d+)?(?![\w-]|\.\d)( ?%)?"
)
NOT_PROSE = re.compile(r"`[^`]*`|\]\([^)]*\)|\d{4}-\d\d(-\d\d)?|^\d+\. ")
IN_SOURCE = re.compile(r"(?<![A-Za-z_])(?:\d[\d_,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
RESULTS = (ROOT / "benchmarks/results", ROOT / "studies/results")
STUDIES = ROOT / "studies"


@dataclass(frozen=True)
class Figure:
    """A number as it is written, and the unit of its last digit."""

    text: str
    value: float
    unit: float

    def is_in(self, numbers: set[float]) -> bool:
        """Does one of them round to it? A share may be .91 here and 91 % there."""
        other = 0.01 if "%" in self.text else 100 if self.value < 1 else 1
        forms = [(self.value * scale, self.unit * scale) for scale in (1, other)]
        return any(
            abs(number - value) <= 0.501 * unit for number in numbers for value, unit in forms
        )


def sentences(page: Path) -> Iterator[tuple[str, str]]:
    """Sentences, and rows of tables, that cite a test or a script; each with its paragraph.

    A page of results is what its scripts have printed: only tests are looked up there.
    """
    citation = re.compile("`[^`]*pytest ") if page.parent in RESULTS else CITED
    for paragraph in re.split(r"\n\n|\n(?=[|-] ?)", prose(page.read_text(encoding="utf-8"))):
        whole = paragraph.replace("\n", " ")
        parts = [whole] if whole.startswith("|") else re.split(r"(?<=[.:;])\s+(?=[A-Z*`\[])", whole)
        yield from ((part, whole) for part in parts if citation.search(part))


def figures(sentence: str) -> Iterator[Figure]:
    """Those outside code, links and dates."""
    for found in WRITTEN.finditer(NOT_PROSE.sub(" ", sentence)):
        digits, power = found[1].replace(",", ""), (found[2] or "e0").replace("−", "-")
        decimals = len(digits.partition(".")[2])
        yield Figure(
            found[0].strip(" ,"), float(digits + power), float(f"1{power}") * 10.0**-decimals
        )


def numbers(text: str) -> set[float]:
    return {
        float(found.strip("_,").replace(",", "").replace("_", ""))
        for found in IN_SOURCE.findall(re.sub(r",(?!\d{3}\b)", ", ", text))
    }


def cited(sentence: str, paragraph: str, page: Path) -> set[float]:
    """The numbers in the source of the cited tests; of scripts, also in their arguments and
    committed results."""
    texts = []
    for program, given in CITED.findall(sentence):
        words = given.split()
        texts += (
            [source_of(words)]
            if "pytest" in program
            else [given, *results_of(words[0], paragraph, page)]
        )
    return numbers("\n".join(texts))


def source_of(words: list[str]) -> str:
    """Of the tests that `pytest FILES -k NAME` chooses, with their parameters, also those in a table
    of the file; whole files without -k."""
    sources = [
        (ROOT / word).read_text(encoding="utf-8") for word in words if word.startswith("tests/")
    ]
    if "-k" not in words:
        return "\n".join(sources)
    name, chosen = words[words.index("-k") + 1], []
    for source in sources:
        nodes = ast.parse(source).body
        tables = {ast.unparse(one.targets[0]): one for one in nodes if isinstance(one, ast.Assign)}
        for node in nodes:
            if (
                isinstance(node, ast.FunctionDef)
                and node.name.startswith("test_")
                and name in node.name
            ):
                used = [ast.unparse(one) for each in node.decorator_list for one in ast.walk(each)]
                named = [tables[name] for name in used if name in tables]
                parts = [*node.decorator_list, *named, node]
                chosen += [ast.get_source_segment(source, part) or "" for part in parts]
    return "\n".join(chosen)


def results_of(module: str, paragraph: str, page: Path) -> list[str]:
    """A script, and the result files that its paragraph links, that it names, or that have its
    name."""
    script = ROOT / f"{module.replace('.', '/')}.py"
    source = script.read_text(encoding="utf-8")
    linked = [
        (page.parent / target).resolve()
        for target in re.findall(r"\]\(([^)#]+\.json|[^)#]+\.md)\b", paragraph)
    ]
    files = {file for file in linked if file.parent in (*RESULTS, STUDIES)}
    names = {
        *re.findall(r"[\w-]+\.(?:json|md)\b", source),
        f"{script.stem}.json",
        f"{script.stem}.md",
    }
    files |= {folder / name for folder in RESULTS for name in names}
    return [
        source,
        *(
            file.read_text(encoding="utf-8")
            for file in sorted(files)
            if file.is_file() and file != page
        ),
    ]
