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
from tests.rewards.chat_server import WORDS, brightness, chatting, means_in, pictures_in, text_in
from tests.support.edits import edits
from tests.support.pictures import flat
from tests.support.tolerances import rounding
from tests.support.waiting import PATIENCE_S

NAN = math.nan
GREY = torch.tensor([51, 102, 153, 204]) / 255


def asking(server, model="judge", endpoint=None, **options):
    return VLMJudge(
        server.url,
        model,
        endpoint={"timeout_s": PATIENCE_S, "retries": 1, **(endpoint or {})},
        **options,
    )


@pytest.mark.parametrize("style", ["vllm", "llama.cpp"])
def test_yes_no_is_the_probability_of_all_spellings_of_yes_over_those_of_yes_and_no(style):
    with chatting(style) as server:
        judge = asking(server, form="yes_no", image_size=16)
        scores = judge(flat(*GREY), ["a", "b", "c", "{braces} in it"])
    asked = {text_in(body): body for body in server.requests}
    (last,) = (body for text, body in asked.items() if "{braces} in it" in text)
    assert (last["model"], last["max_tokens"], last["temperature"]) == ("judge", 1, 0.0)
    assert (last["logprobs"], last["top_logprobs"]) == (True, 20)
    assert [picture.size for picture in pictures_in(last)] == [(16, 12)]
    shares = torch.tensor([brightness(float(mean), "") for mean in GREY]).exp()
    is_yes, is_no = (torch.tensor([of in word.lower() for word in WORDS]) for of in ("yes", "no"))
    yes, no = shares[:, is_yes].sum(1), shares[:, is_no].sum(1)
    # sums of eight words, of exponentials
    torch.testing.assert_close(scores, yes / (yes + no), **rounding(16))


@pytest.mark.parametrize(
    ("listed", "score"),
    [
        ({"Yes": -0.5, "The": -2.0}, 1.0),
        ({"no": -0.5, "The": -2.0}, 0.0),
        ({"Yes": -9999.0, "No": -0.1}, 0.0),  # vLLM's minus infinity
        ({"The": -0.1, "yesterday": -3.0}, NAN),
        ({}, NAN),
    ],
)
def test_a_word_that_is_not_listed_has_probability_0_and_without_both_there_is_no_score(
    listed, score
):
    rows = [{"token": token, "logprob": value} for token, value in listed.items()]
    logprobs = {"content": [{"top_logprobs": rows}] if listed else []}
    answer = Completion.model_validate({"choices": [{"logprobs": logprobs}]})
    assert answer.probability_of(("yes", "no")) == pytest.approx(score, nan_ok=True)


def test_prose_is_counted_in_one_warning(caplog):
    def prose_if_dark(mean, text):
        return brightness(mean, text) if mean > 0.5 else (*[-1e5] * 5, 3.0, 1.0, -1e5)

    with chatting(logits=prose_if_dark) as server:
        judge = asking(server, form="yes_no", endpoint={"check": False})
        scores = judge(flat(*GREY, NAN), ["a"] * 5)
    assert len(server.requests) == 4  # prose is an answer: it is not asked for again
    assert scores.isnan().tolist() == [True, True, False, False, True]
    (record,) = caplog.records
    wrong = "3 of 5 images: 1 (pixels that are not finite), 2 (the judge's answer has no score)"
    assert wrong in record.getMessage()


def test_a_judge_that_cannot_work_is_refused_when_it_is_made():
    with chatting() as server:
        with pytest.raises(NoAnswer, match="'judgee'.*Did you mean 'judge'"):
            asking(server, "judgee")
        with pytest.raises(Refused, match="max allowed: 20"):
            asking(server, form="yes_no", request={"top_logprobs": 21})
        with pytest.raises(ValueError, match="{prompt}"):
            asking(server, template="how good is it?")
        server.logprobs = False
        with pytest.raises(NoAnswer, match="log-probs"):
            asking(server, form="yes_no")
        with pytest.raises(Refused, match="404"):
            asking(server, "judgee", endpoint={"check": False})(flat(0.5), ["a"])
    with chatting("llama.cpp") as server:
        asking(server, "any name", form="yes_no")
        server.vision = False
        with pytest.raises(NoAnswer, match="image input"):
            asking(server, "any name", form="yes_no")


def test_a_picture_that_a_filter_refuses_has_no_score(caplog, naps):
    """It would be refused again after every resume; but who refuses everything cannot judge."""
    with chatting(says=lambda body: "Final Score: 3") as server:
        server.filtered = lambda body: means_in(body)[0] > 0.7
        judge = asking(server, endpoint={"check": False})
        with pytest.raises(Refused, match="400.*unsafe"):
            judge(flat(0.9), ["a"])
        assert judge(flat(*GREY), ["a"] * 4).isnan().tolist() == [False] * 3 + [True]
        assert judge(flat(0.9), ["a"]).isnan().all()
        server.filtered, server.finish = lambda body: False, "content_filter"
        assert judge(flat(0.5), ["a"]).isnan().all() and not naps
    assert "1 of 4 requests have no score, the first:" in caplog.text


def test_an_edit_is_judged_beside_what_it_was_made_from(tmp_path):
    """An edited picture is a good one if it differs from the input: the model answers by both
    pictures."""
    edited = edits(tmp_path, red=(0.25,), blue=(0.75, 0.5))

    def kept(body):
        before, *_, after = means_in(body)
        assert text_in(body).count("make it") <= 1
        values = zip(FORMS["edit"].scores, (10 * after, 10 * before, 9), strict=True)
        return "\n".join(f"{name} (0-10): {value:.3f}" for name, value in values)

    with chatting(says=kept) as server:
        judge = asking(server, form="edit")
        assert len(pictures_in(server.requests[-1])) == 2  # tried with two pictures
        scores = judge(flat(*GREY), [*edited, edited[0], "no picture"])
    assert sorted(len(pictures_in(body)) for body in server.requests) == [2, 2, 2, 3]
    means = [min(pair) for pair in zip(GREY[:3].tolist(), (0.25, 0.75, 0.25), strict=True)]
    wanted = torch.tensor([10 * (mean * 0.9) ** 0.5 for mean in means] + [NAN])
    # .25 and .75 are within a quarter of a level of 8 bits, which moves 10 sqrt(.9 mean) by .0093;
    # and three decimals are written
    torch.testing.assert_close(scores, wanted, atol=0.0105, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "images", "refusal"),
    [
        ({"form": "edit"}, (), "form=edit is for edits, but none of 2 prompts has an input"),
        ({"form": "edit_yes_no"}, ("a.png",), None),
        ({"form": "final"}, ("a.png",), "prompt 'blue' has an input picture: take form=edit"),
        ({"form": "final", "template": "Is {prompt} done?"}, ("a.png",), None),
        ({"form": "final"}, (), None),
    ],
)
def test_forms_that_do_not_fit_the_prompts_are_refused(options, images, refusal):
    said = VLMJudge.fault({"template": None, **options}, ["red", Prompt("blue", images=images)])
    assert said is None if refusal is None else refusal in said


def test_a_judge_may_think_before_it_decides():
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    with chatting(says=lambda body: "Final Score: 3") as server:
        judge = asking(server, request=thinking)
        assert judge(flat(0.5), ["a"]).tolist() == [3.0]
        assert thinking.items() <= server.requests[-1].items()
        server.finish = "length"  # thoughts went to a field of their own, and no text is left
        assert judge(flat(0.5), ["a"]).isnan().all() and len(server.requests) == 2


def test_scores_of_a_template_of_ones_own_have_its_range(caplog):
    """Else those above 5 would be missing, and the worst pictures alone have scores."""
    scale = {"template": "How good is {prompt}, from 0 to 100?"}

    def per_cent(body):
        return f"Final Score (0-100): {100 * means_in(body)[0]:.0f} %"

    with chatting(says=per_cent) as server:
        found = asking(server, range=[0, 100], **scale)(flat(*GREY), ["a"] * 4)
        assert found.tolist() == [20, 40, 60, 80]
        asking(server, **scale)(flat(*GREY), ["a"] * 4)
        assert "4 (the judge's answer has no score from 1 to 5)" in caplog.records[-1].getMessage()
        for wrong in ({"form": "yes_no", **scale}, {}):
            with pytest.raises(ValueError, match="range is for scores that a template"):
                asking(server, range=[0, 100], **wrong)
        with pytest.raises(ValueError, match=r"lowest and the highest score, got \[100, 0\]"):
            asking(server, range=[100, 0], **scale)


def test_an_instruction_is_read_from_a_file_and_not_run(tmp_path):
    script = tmp_path / "upstream.py"
    script.write_text(
        "raise SystemExit('this must not run')\nprompt = ''\n"
        "problem = (\n    'Score \\n'\n    f'Caption: [{prompt}]'\n)\nnumber = 3\ntyped: str = 'Score'\nfield = f'{1 + 1}'\n"
    )
    assert read_instruction(f"{script}:problem") == "Score \nCaption: [{prompt}]"
    assert read_instruction(f"{script}:typed") == "Score"
    for name in ("nothing", "number", "field"):
        with pytest.raises(ValueError, match="assigns nothing|no plain string"):
            read_instruction(f"{script}:{name}")
    (tmp_path / "mine.txt").write_text("How good is {prompt}?")
    with chatting() as server:
        for template, begins in ((f"{script}:problem", "Score"), (f"{tmp_path}/mine.txt", "How")):
            assert asking(server, template=template).template.startswith(begins)
        with pytest.raises(FileNotFoundError):
            asking(server, template="nowhere.txt")


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("circle (shape): 1\nFinal Score: 4", 4.0),
        ("**Final Score:** 3.5/5", 3.5),
        ("Final Score: 2? No. Final Score: 4", 4.0),
        ("Final Score: 1-5? I say Final Score: 5.", 5.0),
        ("<think>Final Score: 2, or 3?</think> Final Score: 4", 4.0),
        ("Final Score: 4\n- 2 cats are missing", 4.0),
        ("<think>so far Final Score: 2", NAN),  # max_tokens ended it
        ("<think>Final Score: 2</think> I cannot say.", NAN),
        ("Final Score: 3,5", 3.5),
        ("Final Score: 4, of 5", 4.0),
        ("Final Score: 1 to 5", NAN),
        ("Final Score: 1,5-4,5", NAN),
        ("Final Score: 1 - 5", NAN),
        ("Final Score: 1–5", NAN),
        ("Final Score: **3**/10", NAN),  # on another scale
        ("Final Score: 4 out of 10", NAN),
        ("Final Score: 4 %", NAN),
        ('{"Final Score": 4}', 4.0),
        ("Final Score（1–5）：4", 4.0),
        ("Final Score: 0", NAN),
        ("I cannot judge this. 4", NAN),
    ],
)
def test_a_final_score_is_read(text, score):
    assert parse_scores(text, ["Final Score"]) == pytest.approx(score, nan_ok=True)


@pytest.mark.parametrize(
    ("form", "numbers", "score"),
    [
        ("edit", (8, 2, 4), 8**0.5),
        ("edit", (2, 8, 4), 8**0.5),
        ("edit", (0, 8, 9), 0.0),
        ("edit", (11, 8, 9), NAN),
        ("aspects", (2.694700002670288, 2.371500015258789, 2.5), 2.522066672643),
    ],
)
def test_scores_of_several_names_are_combined(form, numbers, score):
    """An edit is no better than its worst part; aspects, decimals as UnifiedReward 2.0 writes them
    (its point_score_ACS_image_generation.py), are averaged."""
    names = FORMS[form].scores
    text = "\n".join(f"**{name} (1-5):** {n}" for name, n in zip(names, numbers, strict=True))
    assert parse_scores(text, names, FORMS[form]) == pytest.approx(score, nan_ok=True)
