"""Pages of the documentation site that are made while it is built: a hook of mkdocs (mkdocs.yml).

README.md becomes the start page, those of benchmarks/ and studies/ the results, examples/*.ipynb
pages with their code. Config keys come from the schema, commands from typer, the API from docstrings. Links
out of docs/ lead to these pages or to the repository.
"""

from __future__ import annotations

import json
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

REPOSITORY = "https://github.com/g2rpo/g2rpo"
LINK = re.compile(r"(?<=\]\()(?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?(?=\))")
API = {
    "The package from Python": ["api"],
    "Protocols and data": ["core.types", "core.data", "core.plans", "core.noise"],
    "Formulas": ["core.flow", "core.objectives", "core.statistics"],
    "Algorithms": ["algorithms.policy_gradient", "algorithms.forward_process", "core.contracts"],
    "Rollouts": ["rollout.engine", "rollout.tails", "rollout.scoring"],
    "Training": ["train.trainer", "train.updater", "train.run.checkpoint"],
    "Extensions and errors": ["core.plugins", "core.errors"],
}
"""Pages of the API reference, each with its modules."""


def measured() -> dict[str, str]:
    """Pages and pictures of studies/ and benchmarks/, and where the site has them."""
    places = {
        "studies/README.md": "results/studies.md",
        "studies/results/registered.md": "results/registered_tables.md",
        "benchmarks/README.md": "results/benchmarks.md",
    }
    for pattern in ("studies/*.md", "benchmarks/results/*.md", "studies/results/*.png"):
        for file in sorted(ROOT.glob(pattern)):
            if file.name not in ("README.md", "LOG.md"):
                places[file.relative_to(ROOT).as_posix()] = f"results/{file.name}"
    return places


MEASURED = measured()


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that are made, and puts them into the navigation."""
    from mkdocs.structure.files import File

    made = {
        page: (text, source)
        for section in SECTIONS.values()
        for page, (text, source) in section().items()
    }
    made["index.md"] = ((ROOT / "README.md").read_text(encoding="utf-8"), "README.md")
    for page, (text, source) in made.items():
        file = File.generated(
            config, page, content=moved_links(text, source, page) if source else text
        )
        files.append(file)
    for path, picture in MEASURED.items():
        if picture.endswith(".png"):
            files.append(File.generated(config, picture, abs_src_path=str(ROOT / path)))
    for entry in config.nav:
        for title in entry.keys() & SECTIONS.keys():
            entry[title] = [
                *entry[title],
                *(page for page in made if page.startswith(f"{title.lower()}/")),
            ]
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links of docs/*.md that lead out of docs/."""
    source = Path(page.file.abs_src_path or "")
    if not source.is_relative_to(ROOT / "docs"):
        return markdown  # made, its links are right
    return moved_links(markdown, source.relative_to(ROOT).as_posix(), page.file.src_uri)


def moved_links(text: str, source: str, page: str) -> str:
    """`text` of the repository's file `source`, with links that are right on the site's page
    `page`."""

    def moved(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[1]))
        there = site_page(target)
        if there is None:
            return f"{REPOSITORY}/{'tree' if (ROOT / target).is_dir() else 'blob'}/main/{target}{found[2] or ''}"
        return posixpath.relpath(there, posixpath.dirname(page) or ".") + (found[2] or "")

    return LINK.sub(moved, text)


def site_page(path: str) -> str | None:
    """The site's page or picture for a file of the repository; None where it has none."""
    if path == "README.md":
        return "index.md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return MEASURED.get(path)


def results() -> dict[str, tuple[str, str | None]]:
    """The pages of studies/ and benchmarks/, after the pages that explain them."""
    pages = {page: path for path, page in MEASURED.items() if path.endswith(".md")}
    return {page: ((ROOT / path).read_text(encoding="utf-8"), path) for page, path in pages.items()}


def reference() -> dict[str, tuple[str, str | None]]:
    """Config keys, algorithms, commands and the API."""
    made: dict[str, tuple[str, str | None]] = {
        "reference/config.md": (config_page(), None),
        "reference/algorithms.md": (algorithms_page(), None),
        "reference/commands.md": (commands_page(), None),
    }
    for title, modules in API.items():
        body = "\n\n".join(f"::: g2rpo.{module}" for module in modules)
        made[f"reference/api-{modules[0].removeprefix('core.').split('.')[0]}.md"] = (
            f"# {title}\n\n{body}\n",
            None,
        )
    return made


def notebooks() -> dict[str, tuple[str, str | None]]:
    """examples/*.ipynb as pages: text and code, without outputs."""
    found = sorted((ROOT / "examples").glob("*.ipynb"))
    return {
        f"notebooks/{file.stem}.md": (notebook_page(file), f"examples/{file.name}")
        for file in found
    }


SECTIONS = {"Results": results, "Reference": reference, "Notebooks": notebooks}


def notebook_page(file: Path) -> str:
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    parts = [
        ("{}" if cell["cell_type"] == "markdown" else "```python\n{}\n```").format(
            "".join(cell["source"])
        )
        for cell in cells
    ]
    return (
        "\n\n".join(
            [
                *parts[:1],
                f"Open it with Jupyter: [`examples/{file.name}`]({file.name}).",
                *parts[1:],
            ]
        )
        + "\n"
    )


def commands_page() -> str:
    command = [
        sys.executable,
        "-m",
        "typer",
        "g2rpo.cli.main",
        "utils",
        "docs",
        "--name",
        "g2rpo",
        "--title",
        "Commands",
    ]
    done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=True)
    return done.stdout.replace("&#x27;", "'")


def config_page() -> str:
    """Every key of a config below its section, with type, default and docstring."""
    import griffe

    from g2rpo.config.schema import Config

    schema = Config.model_json_schema()
    source = griffe.load("g2rpo.config.schema", search_paths=[str(ROOT / "src")])
    intro = "Every key that a recipe, a config.yaml or an override `KEY=VALUE` may have; made from `src/g2rpo/config/schema.py`. "
    parts = [
        f"# Config keys\n\n{intro}The keys below `algorithm` are those of [its algorithm](algorithms.md)."
    ]
    below = [("", schema, "Config"), *sections(schema, schema)]
    for name, part, kind in below:
        doc = source.members[kind].docstring if kind in source.members else None
        text = doc.value if doc else as_markdown(part.get("description", ""))
        fields = source.members[kind].members if kind in source.members else {}
        reasons = {
            key: member.docstring.value for key, member in fields.items() if member.docstring
        }
        parts.append(
            f"## {f'`{name}`' if name else 'Top level'}\n\n{text}\n\n{table(part, reasons)}"
        )
    return "\n\n".join(parts) + "\n"


def sections(part: dict, schema: dict, prefix: str = "") -> list[tuple[str, dict, str]]:
    """(name, schema, class) of the groups of keys below `part`, in order; `NAME` stands for a
    reward's own name."""
    found = []
    for key, entry in part["properties"].items():
        inner = next(iter(entry.get("patternProperties", {}).values()), entry)
        name = f"{prefix}{key}" + (".NAME" if inner is not entry else "")
        if "$ref" in inner:
            kind = inner["$ref"].rpartition("/")[2]
            found += [
                (name, schema["$defs"][kind], kind),
                *sections(schema["$defs"][kind], schema, f"{name}."),
            ]
    return found


def algorithms_page() -> str:
    """Every built-in algorithm: its docstring and its fields."""
    from pydantic import TypeAdapter

    from g2rpo.config.algorithms import ALGORITHMS

    explained = "[G²RPO](../algorithm.md), [the others](../neighbours.md)"
    intro = f"`algorithm.name` chooses one; the other keys below `algorithm` are its fields (explained: {explained})."
    parts = [f"# Algorithms and their keys\n\n{intro}"]
    for name, kind in ALGORITHMS.items():
        schema = TypeAdapter(kind).json_schema()
        parts.append(
            f"## `{name}`\n\n{as_markdown(schema.get('description', ''))}\n\n{table(schema, {})}"
        )
        parts += [
            f"### {inner['title']} of `{name}`\n\n{as_markdown(inner.get('description', ''))}\n\n{table(inner, {})}"
            for inner in schema.get("$defs", {}).values()
        ]
    return "\n\n".join(parts) + "\n"


def as_markdown(docstring: str) -> str:
    """A docstring whose lines `field: meaning` become a list."""
    text = re.sub(r"\n {4}(?=\S)", " ", docstring)
    return re.sub(r"^([a-z_]+(?:, [a-z_]+)*): ", r"\n- `\1`: ", text, flags=re.MULTILINE)


def table(schema: dict, reasons: dict[str, str]) -> str:
    """Keys of a JSON schema as a table."""
    rows = [
        "| key | type | default |" + (" |" if reasons else ""),
        "|---|---|---|" + ("---|" if reasons else ""),
    ]
    for key, entry in schema["properties"].items():
        default = shown_default(entry, key in schema.get("required", ()))
        cells = [
            f"`{key}`",
            shown_type(entry),
            default,
            *([reasons.get(key, "")] if reasons else []),
        ]
        rows.append(
            "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"
        )
    return "\n".join(rows)


def shown_default(entry: dict, required: bool) -> str:
    if required:
        return "required"
    if "default" not in entry or isinstance(entry["default"], dict):
        return "below" if "$ref" in entry else "none"
    return f"`{json.dumps(entry['default'], ensure_ascii=False)}`"


def shown_type(entry: dict) -> str:
    """A JSON schema's type in words, with its bounds."""
    if "anyOf" in entry:
        return " or ".join(shown_type(each) for each in entry["anyOf"])
    if "const" in entry or "enum" in entry:
        return ", ".join(f"`{each}`" for each in entry.get("enum", [entry.get("const")]))
    if "$ref" in entry:
        return "keys of their own, below"
    if "patternProperties" in entry:
        return "by name"
    if entry.get("type") == "array" and "prefixItems" in entry:
        return f"list of {len(entry['prefixItems'])}: {shown_type(entry['prefixItems'][0])}"
    if entry.get("type") == "array":
        return f"list of {shown_type(entry.get('items', {}))}"
    signs = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}
    bounds = ", ".join(f"{sign} {entry[key]}" for key, sign in signs.items() if key in entry)
    words = {
        "string": "text",
        "number": "number",
        "integer": "integer",
        "boolean": "true or false",
        "object": "mapping",
        "null": "null",
    }
    return f"{words.get(entry.get('type', ''), 'any')} {bounds}".strip()
