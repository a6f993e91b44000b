"""A vision-language model as judge: the probability of yes from log-probs, and what servers and models answer otherwise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from g2rpo.rewards.instructions import read_instruction
from g2rpo.rewards.transport import NoAnswer, Refused
from g2rpo.rewards.vlm import VLMJudge, parse_scores
from g2rpo.rewards.yes_no import yes_probability
from tests.rewards.chat_server import WORDS, ChatServer, brightness, running

QUICK: dict[str, Any] = {"timeout_s": 5.0, "retries": 1, "backoff_s": 0.01}
GREY = torch.tensor([0.2, 0.4, 0.6, 0.8]).mul(255).round().div(255)


def flat(values: Tensor) -> Tensor:
    """Pictures [B, 3, 24, 32] of one grey each."""
    return values.reshape(-1, 1, 1, 1).expand(-1, 3, 24, 32).contiguous()


@pytest.mark.parametrize("style", ["vllm", "llama.cpp"])
def test_yes_no_is_the_probability_of_all_spellings_of_yes_over_those_of_yes_and_no(style: Any) -> None:
    server = ChatServer(style)
    with running(server):
        judge = VLMJudge(server.url, "judge", form="yes_no", **QUICK)
        scores = judge(flat(GREY), ["a", "b", "c", "d"])
        asked = server.requests[-1]
    logits = torch.tensor([brightness(4.0)(float(mean), "") for mean in GREY])
    yes = logits[:, [WORDS.index(word) for word in ("Yes", " yes", "YES", "\u2581Yes")]].exp().sum(1)
    no = logits[:, [WORDS.index(word) for word in ("No", " no")]].exp().sum(1)
    torch.testing.assert_close(scores, yes / (yes + no), atol=1e-6, rtol=0)  # float32 of eight words
    assert len(set(scores.tolist())) == 4
    assert {key: asked[key] for key in ("max_tokens", "logprobs", "top_logprobs", "temperature")} == {
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 20,
        "temperature": 0.0,
    }


def answer_with(**logprobs: float) -> dict[str, Any]:
    rows = [{"token": token, "logprob": value} for token, value in logprobs.items()]
    return {"choices": [{"logprobs": {"content": [{"token": "x", "logprob": -1.0, "top_logprobs": rows}]}}]}


def test_a_word_that_is_not_listed_has_probability_0_and_without_both_there_is_no_score() -> None:
    assert yes_probability(answer_with(Yes=-0.5, The=-2.0)) == 1.0
    assert yes_probability(answer_with(no=-0.5, The=-2.0)) == 0.0
    assert yes_probability(answer_with(Yes=-9999.0, No=-0.1)) == 0.0  # vLLM's minus infinity
    assert math.isnan(yes_probability(answer_with(The=-0.1, yesterday=-3.0)))
    assert math.isnan(yes_probability({"choices": [{"logprobs": {"content": []}}]}))
    for garbage in ({}, {"choices": [{"logprobs": None}]}, answer_with(Yes=3.0), answer_with(Yes="x")):  # type: ignore[arg-type]
        with pytest.raises(NoAnswer, match="log-probs"):
            yes_probability(garbage)


def test_prose_is_counted_in_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    def prose_if_dark(mean: float, text: str) -> tuple[float, ...]:
        return brightness(4.0)(mean, text) if mean > 0.5 else (-1e5, -1e5, -1e5, -1e5, -1e5, 3.0, 1.0, -1e5)

    server = ChatServer("vllm", prose_if_dark)
    with running(server):
        judge = VLMJudge(server.url, "judge", form="yes_no", check=False, **QUICK)
        scores = judge(flat(torch.cat([GREY, torch.tensor([torch.nan])])), ["a"] * 5)
        assert len(server.requests) == 4  # prose is an answer: it is not asked for again
    assert scores.isnan().tolist() == [True, True, False, False, True]
    (record,) = caplog.records
    said = "no score for 3 of 5 images: 1 (pixels that are not finite), 2 (the judge's answer has no score)"
    assert record.getMessage() == said


def test_a_judge_that_cannot_work_is_refused_when_it_is_made() -> None:
    server = ChatServer("vllm")
    with running(server):
        with pytest.raises(NoAnswer, match=r"has no model 'judgee', but \['judge'\]. Did you mean 'judge'"):
            VLMJudge(server.url, "judgee", **QUICK)
        with pytest.raises(Refused, match="greater than max allowed: 20"):
            VLMJudge(server.url, "judge", form="yes_no", request={"top_logprobs": 21}, **QUICK)
        server.logprobs = False
        with pytest.raises(NoAnswer, match="answered no log-probs of its first token"):
            VLMJudge(server.url, "judge", form="yes_no", **QUICK)
    server = ChatServer("llama.cpp")
    with running(server):
        assert torch.isfinite(VLMJudge(server.url, "any name", form="yes_no", **QUICK)(flat(GREY), ["a"] * 4)).all()
        server.vision = False
        with pytest.raises(NoAnswer, match="image input is not supported"):
            VLMJudge(server.url, "any name", form="yes_no", **QUICK)


def test_a_judge_thinks_before_it_decides() -> None:
    assert parse_scores("<think>Final Score: 2, or 3?</think> Final Score: 4", ["Final Score"]) == 4
    assert math.isnan(parse_scores("<think>so far Final Score: 2", ["Final Score"]))  # max_tokens ended it
    assert math.isnan(parse_scores("<think>Final Score: 2</think> I cannot say.", ["Final Score"]))
    server = ChatServer("vllm", says="Final Score: 3")
    with running(server):
        judge = VLMJudge(server.url, "judge", request={"chat_template_kwargs": {"enable_thinking": False}}, **QUICK)
        assert judge(flat(GREY[:1]), ["a"]).tolist() == [3.0]
        assert server.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False}
        server.finish = "length"  # thoughts went to a field of their own, and no text is left
        assert judge(flat(GREY[:1]), ["a"]).isnan().all()
        assert len(server.requests) == 2


def test_an_instruction_is_read_from_a_file_and_not_run(tmp_path: Path) -> None:
    script = tmp_path / "upstream.py"
    script.write_text(
        "raise SystemExit('this must not run')\nprompt = ''\n"
        "problem = (\n    'Score \\n'\n    f'Caption: [{prompt}]'\n)\nnumber = 3\nfield = f'{1 + 1}'\n"
    )
    assert read_instruction(f"{script}:problem") == "Score \nCaption: [{prompt}]"
    for name, says in (("nothing", "assigns nothing to nothing"), ("number", "no plain string"), ("field", "no plain string")):
        with pytest.raises(ValueError, match=says):
            read_instruction(f"{script}:{name}")
    (tmp_path / "mine.txt").write_text("How good is {prompt}?")
    judges = [
        VLMJudge("http://127.0.0.1:1", "m", template=t, check=False) for t in (f"{script}:problem", f"{tmp_path}/mine.txt")
    ]
    assert [judge.template[:5] for judge in judges] == ["Score", "How g"]
    with pytest.raises(FileNotFoundError, match="no such file"):
        VLMJudge("http://127.0.0.1:1", "m", template="nowhere.txt", check=False)


@pytest.mark.parametrize("style", ["vllm", "llama.cpp"])
def test_aspects_are_read_as_unified_reward_2_writes_them(style: Any) -> None:
    """Its scores are decimals: the example in its repository's point_score_ACS_image_generation.py."""
    scores = {"Alignment": 2.694700002670288, "Coherence": 2.371500015258789, "Style": 2.802500009536743}
    says = "\n".join(f"{name} Score (1-5): {value}" for name, value in scores.items())
    server = ChatServer(style, says=says)
    with running(server):
        score = VLMJudge(server.url, "judge", form="aspects", **QUICK)(flat(GREY[:1]), ["a"])
        assert "logprobs" not in server.requests[-1]
        json.dumps(server.requests)
    torch.testing.assert_close(score, torch.tensor([sum(scores.values()) / 3]))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("circle (shape): 1\nFinal Score: 4", 4.0),
        ("**Final Score:** 3.5/5", 3.5),
        ("final score : <2>", 2.0),
        ("Final Score: 1-5? I say Final Score: 5.", 5.0),
        ("<think>Final Score: 2?</think>\nFinal Score: 4", 4.0),
        ("Final Score: 1 to 5", None),
        ("Final Score: 45", None),
        ("Final Score: 0", None),
        ("Final Score: -3", None),
        ("Final Score: good", None),
        ("I cannot judge this. 4", None),
        ("", None),
    ],
)
def test_a_final_score_is_read(text: str, score: float | None) -> None:
    value = parse_scores(text, ["Final Score"])
    assert (value != value) if score is None else value == score


def test_aspects_are_averaged_and_all_are_needed() -> None:
    names = ("Alignment Score", "Coherence Score", "Style Score")
    text = "Alignment Score (1-5): 4\nCoherence Score (1-5): 3\n**Style Score (1-5):** 3.5"
    assert parse_scores(text, names) == pytest.approx(3.5)
    assert parse_scores(text, names[:1]) == 4
    missing = parse_scores(text.replace("Style", "Colour"), names)
    assert missing != missing
