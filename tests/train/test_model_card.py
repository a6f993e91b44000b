"""The card beside the weights, as a hub reads it: its header, and the markdown as CommonMark
understands it."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from huggingface_hub import ModelCardData
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from g2rpo.core.statistics import Comparison
from g2rpo.models.catalogue import SPECS
from g2rpo.models.gaussian import GaussianPolicy
from g2rpo.train.model_card import _code, write_card
from g2rpo.train.run.folder import Run
from tests.support.runs import config
from tests.support.tables import rows

MEAN = "`</code><script>alert(1)</script>\n\n# Mine\n\n![x](http://x/y.png)<!-- ` `` [a](b)"


def card(folder, path="none", **changes):
    """(header, markdown) of a card of the plain config with `changes` to its groups."""
    run = Run(folder)
    for picture in (run.before_after, run.curves):
        picture.parent.mkdir(exist_ok=True)
        picture.touch()
    (folder / "adapter").mkdir(exist_ok=True)
    c = config(f"policy.path={json.dumps(path)}").model_copy(update=changes)
    table = {"bright": Comparison(0.1, 0.2, 0.05, 64)}
    written = write_card(run, folder / "adapter", c, 4, table, ["0"] * 3, GaussianPolicy())
    _, header, markdown = written.read_text().split("---\n", 2)
    return yaml.safe_load(header), markdown


def test_the_hub_reads_results_and_a_picture_from_the_header(tmp_path):
    header, _ = card(tmp_path, path="Qwen/Qwen-Image")
    read = ModelCardData(**header, ignore_metadata_errors=False)
    (result,) = read.eval_results
    assert (result.metric_type, result.metric_value) == ("bright", 0.2)
    assert result.dataset_name == "3 held-out prompts"
    (picture,) = header["widget"]
    assert picture["text"] == "0" and (tmp_path / "adapter" / picture["output"]["url"]).is_file()


def kinds(markdown):
    """Every heading, and the kinds of all tokens."""
    tokens = MarkdownIt("commonmark").parse(markdown)
    heads = [after.content for token, after in pairwise(tokens) if token.type == "heading_open"]
    return heads, [each.type for token in tokens for each in (token, *(token.children or ()))]


def test_words_of_a_recipe_or_a_path_are_only_words(tmp_path):
    heads, types = kinds(card(tmp_path, recipe=MEAN, path=MEAN)[1])
    assert heads[1:] == ["Results", "Use", "Config"] and "Mine" in heads[0]
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
        assert (code.type, code.content) == ("code_inline", words.replace("\0", "\ufffd"))
        assert rest.content == ", tuned"


def test_the_page_of_models_names_those_that_are_not_apache():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    items = re.findall(r"^- .*: .*$", page.partition("## Licences")[2], re.MULTILINE)
    listed = {name for item in items for name in re.findall(r"[\w.-]*\w(?=[,;]|\.$)", item)}
    known = {name: model.licence for spec in SPECS.values() for name, model in spec.known.items()}
    named = {name.partition("/")[2] for name, licence in known.items() if licence != "Apache-2.0"}
    assert named <= listed and not listed & {name.partition("/")[2] for name in known} - named


LICENCES = """
black-forest-labs/FLUX.1-dev -> : FLUX.1 [dev] Non-Commercial License -> flux.1-dev-non-commercial-license
stabilityai/stable-diffusion-3.5-medium -> : Stability AI Community License -> stability-ai-community-license
Qwen/Qwen-Image -> : Apache-2.0 -> apache-2.0
somebody/model -> .\\n -> None
testbed -> .\\n -> None
/data/flux -> .\\n -> None
"""


@pytest.mark.parametrize(("path", "licence", "on_the_hub"), rows(LICENCES))
def test_the_base_model_is_named_if_the_hub_can_have_it_with_its_licence_if_known(
    tmp_path, path, licence, on_the_hub
):
    sampling = config("evaluation.num_steps=20").evaluation
    header, markdown = card(tmp_path, path, evaluation=sampling)
    assert header.get("base_model") == (None if path in ("testbed", "/data/flux") else path)
    assert str(header.get("license_name", header.get("license"))) == on_the_hub
    assert f"# `{path}`, tuned with" in markdown
    assert f"The licence of the base model applies{licence}" in markdown
    assert "num_inference_steps=20" in markdown  # as the results were
