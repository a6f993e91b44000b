"""A vision-language model as judge: the probability of yes from log-probs, and what servers and
models answer otherwise."""

import math

import pytest
import torch

from g2rpo.core.data import Prompt
from g2rpo.rewards.asking import Completion
from g2rpo.rewards.transport import NoAnswer, Refused
from g2rpo.rewards.vlm import FORMS, VLMJudge, parse_scores
from g2rpo.rewards.weights import read_instruction
from tests.rewards.chat_server import WORDS, ChatServer, brightness, mean_of, running
from tests.support.edits import edits

QUICK = {"timeout_s": 5.0, "retries": 1}
GREY = torch.tensor([0.2, 0.4, 0.6, 0.8]).mul(255).round().div(255)


def flat(values):
    """Pictures [B, 3, 24, 32] of one grey each."""
    return values.reshape(-1, 1, 1, 1).expand(-1, 3, 24, 32).contiguous()


@pytest.mark.parametrize("style", ["vllm", "llama.cpp"])
def test_yes_no_is_the_probability_of_all_spellings_of_yes_over_those_of_yes_and_no(style):
    server = ChatServer(style)
    with running(server):
        judge = VLMJudge(server.url, "judge", form="yes_no", endpoint=QUICK)
        scores = judge(flat(GREY), ["a", "b", "c", "d"])
        asked = server.requests[-1]
    logits = torch.tensor([brightness(4.0)(float(mean), "") for mean in GREY])
    yes = (
        logits[:, [WORDS.index(word) for word in ("Yes", " yes", "YES", "\u2581Yes")]].exp().sum(1)
    )
    no = logits[:, [WORDS.index(word) for word in ("No", " no")]].exp().sum(1)
    # float32 of eight words
    torch.testing.assert_close(scores, yes / (yes + no), atol=1e-6, rtol=0)
    assert len(set(scores.tolist())) == 4
    assert (
        asked["max_tokens"],
        asked["logprobs"],
        asked["top_logprobs"],
        asked["temperature"],
    ) == (1, True, 20, 0.0)


def answer_with(**logprobs):
    rows = [{"token": token, "logprob": value} for token, value in logprobs.items()]
    return completion({"content": [{"token": "x", "logprob": -1.0, "top_logprobs": rows}]})


def completion(logprobs):
    return Completion.model_validate({"choices": [{"logprobs": logprobs}]})


def test_a_word_that_is_not_listed_has_probability_0_and_without_both_there_is_no_score():
    assert answer_with(Yes=-0.5, The=-2.0).probability_of(("yes", "no")) == 1.0
    assert answer_with(no=-0.5, The=-2.0).probability_of(("yes", "no")) == 0.0
    # vLLM's minus infinity
    assert answer_with(Yes=-9999.0, No=-0.1).probability_of(("yes", "no")) == 0.0
    assert math.isnan(answer_with(The=-0.1, yesterday=-3.0).probability_of(("yes", "no")))
    assert math.isnan(completion({"content": []}).probability_of(("yes", "no")))
    with pytest.raises(NoAnswer, match="log-probs"):
        completion(None).probability_of(("yes", "no"))


def test_prose_is_counted_in_one_warning(caplog):
    def prose_if_dark(mean, text):
        return (
            brightness(4.0)(mean, text)
            if mean > 0.5
            else (-1e5, -1e5, -1e5, -1e5, -1e5, 3.0, 1.0, -1e5)
        )

    server = ChatServer("vllm", prose_if_dark)
    with running(server):
        judge = VLMJudge(server.url, "judge", form="yes_no", endpoint={**QUICK, "check": False})
        scores = judge(flat(torch.cat([GREY, torch.tensor([torch.nan])])), ["a"] * 5)
        assert len(server.requests) == 4  # prose is an answer: it is not asked for again
    assert scores.isnan().tolist() == [True, True, False, False, True]
    (record,) = caplog.records
    assert (
        "3 of 5 images: 1 (pixels that are not finite), 2 (the judge's answer has no score)"
        in record.getMessage()
    )


def test_a_judge_that_cannot_work_is_refused_when_it_is_made():
    server = ChatServer("vllm")
    with running(server):
        with pytest.raises(NoAnswer, match="'judgee'.*Did you mean 'judge'"):
            VLMJudge(server.url, "judgee", endpoint=QUICK)
        with pytest.raises(Refused, match="max allowed: 20"):
            VLMJudge(
                server.url, "judge", form="yes_no", request={"top_logprobs": 21}, endpoint=QUICK
            )
        server.logprobs = False
        with pytest.raises(NoAnswer, match="log-probs"):
            VLMJudge(server.url, "judge", form="yes_no", endpoint=QUICK)
    server = ChatServer("llama.cpp")
    with running(server):
        VLMJudge(server.url, "any name", form="yes_no", endpoint=QUICK)
        server.vision = False
        with pytest.raises(NoAnswer, match="image input"):
            VLMJudge(server.url, "any name", form="yes_no", endpoint=QUICK)


def test_an_edit_is_judged_beside_what_it_was_made_from(tmp_path):
    """An edited picture is a good one if it differs from the input: the model answers by both
    pictures."""
    edited = edits(tmp_path, red=(0.25,), blue=(0.75, 0.5))

    def kept(body):
        *before, after = [mean_of(part) for part in body["messages"][0]["content"][:-1]]
        assert body["messages"][0]["content"][-1]["text"].count("make it") <= 1
        return f"Success Score (0-10): {10 * after:.3f}\nFaithfulness Score (0-10): {10 * before[0]:.3f}\nQuality Score (0-10): 9"

    server = ChatServer("vllm", says=kept)
    with running(server):
        judge = VLMJudge(server.url, "judge", form="edit", endpoint=QUICK)
        assert len(server.requests[-1]["messages"][0]["content"]) == 3  # tried with two pictures
        scores = judge(flat(GREY), [*edited, edited[0], "no picture"])
    means = [
        min(after, before)
        for after, before in zip(GREY[:3].tolist(), (0.25, 0.75, 0.25), strict=True)
    ]
    torch.testing.assert_close(
        scores,
        torch.tensor([10 * (mean * 0.9) ** 0.5 for mean in means] + [torch.nan]),
        atol=0.02,
        rtol=0,
        equal_nan=True,
    )
    assert sorted(len(body["messages"][0]["content"]) for body in server.requests) == [3, 3, 3, 4]


@pytest.mark.parametrize(
    ("options", "images", "refusal"),
    [
        (
            {"form": "edit"},
            (),
            "form=edit is for edits, but none of 2 prompts has an input picture",
        ),
        ({"form": "edit_yes_no"}, ("a.png",), None),
        ({"form": "final"}, ("a.png",), "prompt 'blue' has an input picture: take form=edit"),
        ({"form": "final", "template": "Is {prompt} done?"}, ("a.png",), None),
        ({"form": "final"}, (), None),
    ],
)
def test_forms_that_do_not_fit_the_prompts_are_refused(options, images, refusal):
    said = VLMJudge.fault(
        {"form": "final", "template": None, **options}, ["red", Prompt("blue", images=images)]
    )
    assert said is None if refusal is None else refusal in said


def test_a_judge_may_think_before_it_decides():
    server = ChatServer("vllm", says="Final Score: 3")
    with running(server):
        judge = VLMJudge(
            server.url,
            "judge",
            request={"chat_template_kwargs": {"enable_thinking": False}},
            endpoint=QUICK,
        )
        assert judge(flat(GREY[:1]), ["a"]).tolist() == [3.0]
        assert server.requests[-1]["chat_template_kwargs"] == {"enable_thinking": False}
        server.finish = "length"  # thoughts went to a field of their own, and no text is left
        assert judge(flat(GREY[:1]), ["a"]).isnan().all()
        assert len(server.requests) == 2


def test_an_instruction_is_read_from_a_file_and_not_run(tmp_path):
    script = tmp_path / "upstream.py"
    script.write_text(
        "raise SystemExit('this must not run')\nprompt = ''\n"
        "problem = (\n    'Score \\n'\n    f'Caption: [{prompt}]'\n)\nnumber = 3\nfield = f'{1 + 1}'\n"
    )
    assert read_instruction(f"{script}:problem") == "Score \nCaption: [{prompt}]"
    for name in ("nothing", "number", "field"):
        with pytest.raises(ValueError, match="assigns nothing|no plain string"):
            read_instruction(f"{script}:{name}")
    (tmp_path / "mine.txt").write_text("How good is {prompt}?")
    for template, begins in ((f"{script}:problem", "Score"), (f"{tmp_path}/mine.txt", "How good")):
        assert VLMJudge(
            "http://127.0.0.1:1", "m", template=template, endpoint={"check": False}
        ).template.startswith(begins)
    with pytest.raises(FileNotFoundError):
        VLMJudge("http://127.0.0.1:1", "m", template="nowhere.txt", endpoint={"check": False})


@pytest.mark.parametrize("style", ["vllm", "llama.cpp"])
def test_aspects_are_read_as_unified_reward_2_writes_them(style):
    """Its scores are decimals: the example in its repository's
    point_score_ACS_image_generation.py."""
    scores = {
        "Alignment": 2.694700002670288,
        "Coherence": 2.371500015258789,
        "Style": 2.802500009536743,
    }
    says = "\n".join(f"{name} Score (1-5): {value}" for name, value in scores.items())
    server = ChatServer(style, says=says)
    with running(server):
        score = VLMJudge(server.url, "judge", form="aspects", endpoint=QUICK)(flat(GREY[:1]), ["a"])
        assert "logprobs" not in server.requests[-1]
    torch.testing.assert_close(score, torch.tensor([sum(scores.values()) / 3]))


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("circle (shape): 1\nFinal Score: 4", 4.0),
        ("**Final Score:** 3.5/5", 3.5),
        ("Final Score: 1-5? I say Final Score: 5.", 5.0),
        ("<think>Final Score: 2, or 3?</think> Final Score: 4", 4.0),
        ("<think>so far Final Score: 2", None),  # max_tokens ended it
        ("<think>Final Score: 2</think> I cannot say.", None),
        ("Final Score: 1 to 5", None),
        ("Final Score: 0", None),
        ("I cannot judge this. 4", None),
    ],
)
def test_a_final_score_is_read(text, score):
    assert parse_scores(text, ["Final Score"]) == pytest.approx(
        math.nan if score is None else score, nan_ok=True
    )


@pytest.mark.parametrize(
    ("numbers", "score"),
    [
        ((8, 2, 4), 8**0.5),
        ((2, 8, 4), 8**0.5),
        ((0, 8, 9), 0.0),
        ((10, 10, 10), 10.0),
        ((11, 8, 9), None),
    ],
)
def test_an_edit_is_no_better_than_its_worst_part(numbers, score):
    names = FORMS["edit"].scores
    text = "\n".join(
        f"**{name} (0-10):** {number}" for name, number in zip(names, numbers, strict=True)
    )
    wanted = pytest.approx(math.nan if score is None else score, nan_ok=True)
    assert parse_scores(text, names, FORMS["edit"]) == wanted


def test_a_list_after_a_score_is_no_range():
    assert parse_scores("Final Score: 4\n- 2 cats are missing", ["Final Score"]) == 4
    assert math.isnan(parse_scores("Final Score: 1 - 5", ["Final Score"]))
