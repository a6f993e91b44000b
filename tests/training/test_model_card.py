"""The card beside the weights, as a hub reads it: its header, and the markdown as CommonMark
understands it."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from g2rpo.core.statistics import Comparison
from g2rpo.policies.catalogue import SPECS
from g2rpo.policies.gaussian import GaussianPolicy
from g2rpo.run.run import Run
from g2rpo.training.model_card import _code, write_card
from tests.support.runs import config

MEAN = "`</code><script>alert(1)</script>\n\n# Mine\n\n![x](http://x/y.png)<!-- ` `` [a](b)"


def card(folder, **changes):
    """(header, markdown) of a card of the plain config with `changes` to its groups."""
    (folder / "samples").mkdir(exist_ok=True)
    run = Run(folder)
    for picture in (run.before_after, run.curves):
        picture.touch()
    (folder / "adapter").mkdir(exist_ok=True)
    c = config()
    path = changes.pop("path", c.policy.path)
    c = c.model_copy(update={**changes, "policy": c.policy.model_copy(update={"path": path})})
    table = {"bright": Comparison(0.1, 0.2, 0.05, 64)}
    text = write_card(
        Run(folder), folder / "adapter", c, table, ["0"] * 3, GaussianPolicy()
    ).read_text()
    _, header, markdown = text.split("---\n", 2)
    return yaml.safe_load(header), markdown


def kinds(markdown):
    """Every heading, and the kinds of all tokens."""
    tokens = MarkdownIt("commonmark").parse(markdown)
    heads = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return heads, [each.type for token in tokens for each in (token, *(token.children or ()))]


def test_words_of_a_recipe_or_a_path_are_only_words(tmp_path):
    plain, _ = kinds(card(tmp_path)[1])
    heads, types = kinds(card(tmp_path, recipe=MEAN, path=MEAN)[1])
    assert (
        heads[1:] == plain[1:] == ["Results", "Use", "Config"]
        and "Mine" in heads[0]
        and len(heads) == len(plain)
    )
    assert not {"html_block", "html_inline", "link_open"} & set(types) and types.count("image") == 2


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip)
    | st.text("` <>#\n", min_size=1)
)
@example("`")
@example("a``")
def test_a_code_span_holds_what_it_was_given(text):
    """CommonMark takes one blank off either end, reads line ends as blanks, and NUL as a character
    that is none."""
    tokens = MarkdownIt("commonmark").parse(f"# {_code(text)}, tuned")
    if words := " ".join(text.split()):
        code, rest = tokens[1].children
        assert (code.type, code.content) == (
            "code_inline",
            words.replace("\0", "\ufffd"),
        ) and rest.content == ", tuned"


@pytest.mark.parametrize(
    ("path", "named"),
    [("black-forest-labs/FLUX.1-dev", True), ("testbed", False), ("/data/flux", False)],
)
def test_the_base_model_is_named_if_the_hub_can_have_it(tmp_path, path, named):
    header, markdown = card(tmp_path, path=path)
    assert (
        header.get("base_model") == (path if named else None)
        and f"# `{path}`, tuned with" in markdown
    )


def test_the_licence_of_the_base_is_named_where_it_is_known(tmp_path):
    _, known = card(tmp_path, path="stabilityai/stable-diffusion-3.5-medium")
    assert "The licence of the base model applies: Stability AI Community License" in known
    assert "The licence of the base model applies.\n" in card(tmp_path, path="somebody/model")[1]


def test_the_table_of_licences_is_the_one_that_commands_use():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| (.*?) \| (.*?) \|$",
        page.partition("| licence of the weights |")[2].partition("\n\n")[0],
        re.MULTILINE,
    )
    table = {model: licence for licence, models in rows for model in models.split(", ")}
    known = {name: model.licence for spec in SPECS.values() for name, model in spec.known.items()}
    assert table == {name.partition("/")[2]: licence for name, licence in known.items()}


def test_the_lines_for_diffusers_take_the_steps_of_the_results(tmp_path):
    c = config("sampling.num_steps=6", "evaluation.num_steps=20")
    _, markdown = card(tmp_path, sampling=c.sampling, evaluation=c.evaluation)
    assert "num_inference_steps=20" in markdown
