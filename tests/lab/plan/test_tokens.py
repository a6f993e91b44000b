"""Plans count the tokens of a run's own prompts, where a model does not pad them."""

import pytest

from g2rpo.lab.plan import models
from g2rpo.lab.plan.models import longest_prompt
from g2rpo.lab.plan.plan import Planner
from g2rpo.models.load import build_policy
from g2rpo.models.options import PolicyConfig
from tests.support.tiny_pipelines import save_tiny
from tests.support.variants import few

PROMPTS = ["a red circle", "two small blue squares left of a red circle", "a"]


@pytest.mark.parametrize(
    "kind",
    few(["QwenImagePipeline", "ZImagePipeline", "CogView4Pipeline"], "ZImagePipeline".__eq__),
)
def test_the_longest_prompt_has_as_many_tokens_as_the_run_gives_it(tmp_path, kind):
    config = PolicyConfig(path=str(save_tiny(kind, tmp_path)), height=32, width=32)
    policy = build_policy(config)
    rows = [policy.encode([prompt]).ragged for prompt in PROMPTS]
    real = [len(row["prompt_embeds"][0]) for row in rows]
    assert longest_prompt(config, PROMPTS) == max(real) == real[1]


@pytest.mark.slow  # two plans of a model that takes long to trace
def test_a_plan_has_these_tokens_and_without_a_tokenizer_the_most_there_may_be(
    tmp_path, tiny_config
):
    folder = save_tiny("ZImagePipeline", tmp_path / "model")
    own = [f"policy.path={folder}", "policy.dtype=float32"]
    plan = Planner(str(tiny_config), own).plan()
    assert (
        plan.model.shapes.text_tokens
        == longest_prompt(plan.config.policy, ["a red circle", "two blue squares"])
        == 5
    )
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    assumed = Planner(str(tiny_config), own)
    plan = assumed.plan()
    assert plan.model.shapes.text_tokens == 12  # the config's max_sequence_length
    assert any(
        "cannot be counted" in note and "are assumed" in note for note in assumed.notes(plan)
    )


def test_models_that_pad_or_are_not_here_are_not_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_counted", lambda *arguments: 1 / 0)
    sana = save_tiny("SanaPipeline", tmp_path)
    for path in (str(sana), "testbed", "Tongyi-MAI/Z-Image", str(tmp_path / "nothing")):
        assert longest_prompt(PolicyConfig(path=path, height=32, width=32), PROMPTS) is None
