"""A vision-language model as judge: the probability of yes from log-probs, and what servers and
models answer otherwise."""

import json
import math

import pytest
import torch

from g2rpo.core.data import Prompt
from g2rpo.core.http import NoAnswer, Refused
from g2rpo.rewards.asking import Said, Unread, probability_of_yes, scores_in
from g2rpo.rewards.vlm import FORMS, VLMJudge
from g2rpo.rewards.weights import read_instruction
from tests.rewards.chat_server import WORDS, brightness, chatting, means_in, pictures_in, text_in
from tests.support.edits import edits
from tests.support.pictures import flat
from tests.support.tables import rows
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


PLACES = r"""
[["Yes", {"Yes": 0.6, "The": 0.1}]] -> 1
[["no", {"no": 0.6, "The": 0.1}]] -> 0
[["No", {"Yes": 0.0, "No": 0.9}]] -> 0
[["Yes", {"Yes": 0.3, " yes,": 0.15, "**NO": 0.15}]] -> 0.75
[["The", {"The": 0.9, "yesterday": 0.05}]] -> begins with 'The'
[["Okay", {"Okay": 0.99, "Yes": 2e-6, "No": 1e-9}]] -> probability of 2e-06 there
[["<think>", {"<think>": 1.0}]] -> thoughts have no end
[["<", {}], ["think", {}], [">", {}], ["No", {"No": 1.0}]] -> thoughts have no end
[["So", {}], ["</think>", {}], ["\u000a", {}], ["Yes", {"Yes": 0.9}], [".", {}]] -> 1
[["<|begin_of_box|>", {}], ["no", {"no": 0.9}], ["<|end_of_box|>", {}]] -> 0
[] -> no word
null -> no log-probs
"""
"""Each token, and probabilities in its place; the answer, or why there is none."""


@pytest.mark.parametrize(("places", "answer"), rows(PLACES))
def test_the_probability_of_yes_is_that_of_the_first_word_after_the_thoughts(places, answer):
    """Of 2e-6 for yes and no together, a ratio says nothing of the picture."""
    places = json.loads(places)
    tokens = places and [(token, [*listed.items()]) for token, listed in places]
    said = Said("", "length", tokens)
    if answer[0].isdigit():
        assert probability_of_yes(said) == pytest.approx(float(answer))
    else:
        with pytest.raises(Unread, match=answer):
            probability_of_yes(said)


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
        server.models = lambda: (405, {})
        unlisted = r"405: .*\n.*no list of models .* endpoint: {check: false}"
        with pytest.raises(Refused, match=unlisted):
            asking(server, form="yes_no")
        del server.models
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


FITTING = """
form=edit ->  -> form=edit is for edits, but none of 2 prompts has an input
form=final -> a.png -> prompt 'blue' has an input picture: take form=edit
form=edit_yes_no -> a.png -> None
form=final template={prompt} -> a.png -> None
form=final ->  -> None
"""


@pytest.mark.parametrize(("options", "images", "refusal"), rows(FITTING))
def test_forms_that_do_not_fit_the_prompts_are_refused(options, images, refusal):
    given = dict(option.split("=") for option in options.split())
    prompts = ["red", Prompt("blue", images=images.split())]
    assert refusal in str(VLMJudge.fault({"template": None, **given}, prompts))


TRIALS = """
final -> {"finish_reason": "length"} -> cut off.*It says: 'Final Score: 3'
final -> {"finish_reason": "length", "message": {"content": null}} -> cut off
final -> {"finish_reason": null} -> does not say how it ended
final -> {"message": {"content": "xxx"}} -> no number for.*It says: 'x{99}[.]{3}$
final -> {"message": {"content": null, "reasoning_content": "Final Score: 4"}} -> no text
aspects -> {} -> does not say 'Alignment Score'
yes_no -> {} -> no log-probs
edit_yes_no -> {"logprobs": {"content": []}} -> no word
final -> {} -> read
final -> {"finish_reason": "STOP"} -> read
final -> {"message": {"content": "Final Score: 4", "reasoning_content": "2?"}} -> read
final -> {"message": {"content": [{"type": "thinking"}, {"type": "text", "text": "Final "}, "Score: 4"]}} -> read
"""


@pytest.mark.parametrize(("form", "more", "refusal"), rows(TRIALS))
def test_a_judge_is_tried_on_a_question_before_training(form, more, refusal):
    """One whose answers cannot be read would have given no score, or wrong ones, at every picture."""
    usual = {"message": {"content": "Final Score: 3"}, "finish_reason": "stop"}
    more = json.loads(more.replace("xxx", "x" * 10**5))
    with chatting() as server:
        server.complete = lambda body: (200, {"choices": [{**usual, **more}]})
        if refusal == "read":
            asking(server, form=form)
        else:
            with pytest.raises(NoAnswer, match=f"trial question cannot be read: .*{refusal}"):
                asking(server, form=form)


FIELDS = """
{} -> {"max_tokens": 1, "temperature": 0.0}
{"max_completion_tokens": 9} -> {"max_completion_tokens": 9, "temperature": 0.0}
{"max_tokens": null, "temperature": null, "extra": {"think": false}} -> {"extra": {"think": false}}
"""


@pytest.mark.parametrize(("given", "sent"), rows(FIELDS))
def test_a_null_leaves_a_field_of_requests_out(given, sent):
    """Newer models take max_completion_tokens alone, and no temperature; the trial asks as all."""
    with chatting() as server:
        asking(server, form="yes_no", request=json.loads(given))(flat(0.5), ["a"])
        fields = "max_tokens", "max_completion_tokens", "temperature", "extra"
        for body in server.requests:
            assert {name: body[name] for name in fields if name in body} == json.loads(sent)


def test_scores_of_a_template_of_ones_own_have_its_range(caplog):
    """Else those above 5 would be missing, and the worst pictures alone have scores."""
    scale = {"template": "How good is {prompt}, from 0 to 100?"}

    def per_cent(body):
        return f"Final Score (0-100): {100 * means_in(body)[0]:.0f} %"

    with chatting(says=per_cent) as server:
        found = asking(server, range=[0, 100], **scale)(flat(*GREY), ["a"] * 4)
        assert found.tolist() == [20, 40, 60, 80]
        with pytest.raises(NoAnswer, match="out of 100, not of 5"):
            asking(server, **scale)
        asking(server, endpoint={"check": False}, **scale)(flat(*GREY), ["a"] * 4)
        assert "4 (the judge's answer has no score from 1 to 5)" in caplog.records[-1].getMessage()
        for wrong in ({"form": "yes_no", **scale}, {}):
            with pytest.raises(ValueError, match="range is for scores that a template"):
                asking(server, range=[0, 100], **wrong)
        with pytest.raises(ValueError, match=r"lowest and the highest score, got \[100, 0\]"):
            asking(server, range=[100, 0], **scale)


UPSTREAM = r"""
raise SystemExit('this must not run')
prompt = ''
problem = (
    'Score \n'
    f'Caption: [{prompt}]'
)
number = 3
typed: str = 'Score'
field = f'{1 + 1}'
"""


def test_an_instruction_is_read_from_a_file_and_not_run(tmp_path):
    script = tmp_path / "upstream.py"
    script.write_text(UPSTREAM)
    assert read_instruction(f"{script}:problem") == "Score \nCaption: [{prompt}]"
    assert read_instruction(f"{script}:typed") == "Score"
    for name in ("nothing", "number", "field"):
        with pytest.raises(ValueError, match="assigns nothing|no plain string"):
            read_instruction(f"{script}:{name}")
    (tmp_path / "mine.txt").write_text("How good is {prompt}?")
    with chatting(says=lambda body: "Final Score: 3") as server:
        for template, begins in ((f"{script}:problem", "Score"), (f"{tmp_path}/mine.txt", "How")):
            assert asking(server, template=template).template.startswith(begins)
        with pytest.raises(FileNotFoundError):
            asking(server, template="nowhere.txt")


FINAL = ["Final Score"], 1.0, 5.0


SCORES = r"""
circle (shape): 1\nFinal Score: 4 -> 4
**Final Score:** 3.5/5 -> 3.5
Final Score: 2? No. Final Score: 4 -> 4
Final Score: 1-5? I say Final Score: 5. -> 5
Final Score: 4\n- 2 cats are missing -> 4
Final Score: 3,5 -> 3.5
Final Score: 4, of 5 -> 4
Final Score: 4.0/5.0 stars -> 4
Final Score: 4 (good) -> 4
Final Score (out of 5): 4 -> 4
Final Score（1–5）：4分 -> 4
### Final Score\n4 -> 4
### Final Score\n\n**4**/5 -> 4
_Final Score:_ <4> -> 4
<b>Final Score</b>: [[4]] -> 4
| Final Score | 4 | -> 4
\boxed{4} -> 4
So it is $\boxed{\text{Final Score: }4}$. -> 4
<|begin_of_box|>4<|end_of_box|> -> 4
<|begin_of_box|>4 -> 4
<answer>Final Score: 4</answer> -> 4
4/5 -> 4
{"Final Score": 4} -> 4
```json\n{"final_score": "4/5", "why": "2 cats"}\n``` -> 4
"""
UNREAD = r"""
Final Score: 3 + 1 = 4 -> more than a number
Final Score: (3+5)/2 = 4 -> more than a number
Final Score: 1 to 5 -> more than a number
Final Score: 1,5-4,5 -> more than a number
Final Score: 1 - 5 -> more than a number
Final Score: 1–5 -> more than a number
Final Score: 4 or 5 -> more than a number
Final Score: 1,000 -> more than a number
Final Score: 3½ -> more than a number
Final Score: 1e0 -> no number
Final Score: -1 -> no number
Final Score: 2\nFinal Score: unknown -> no number
Final Score: **3**/10 -> out of 10, not of 5
\boxed{4}/10 -> out of 10, not of 5
Final Score: 4 out of 10 -> out of 10, not of 5
Final Score: 4 % -> out of 100, not of 5
Final Score: 0 -> 0, not from 1 to 5
I cannot judge this. 4 -> no number
 -> no text
"""


AFTER = pytest.mark.parametrize("before", ["", "<think>Final Score: 2, or 3?</think> "])


@AFTER
@pytest.mark.parametrize(("text", "score"), rows(SCORES))
def test_a_final_score_is_read(before, text, score):
    assert scores_in(Said(before + text, "stop"), *FINAL) == [float(score)]


@AFTER
@pytest.mark.parametrize(("text", "why"), rows(UNREAD))
def test_a_number_that_is_not_the_whole_score_is_not_read(before, text, why):
    with pytest.raises(Unread, match=why):
        scores_in(Said(before + text, "stop"), *FINAL)


THOUGHTS = r"""
<think>%s</think>
%s</think>
<thinking>%s</thinking>
<seed:think>%s</seed:think>
[THINK]%s[/THINK]
◁think▷%s◁/think▷
<|begin_of_thought|>%s<|end_of_thought|>
<|channel>thought\n%s<channel|>
"""


@pytest.mark.parametrize("row", rows(THOUGHTS))
def test_thoughts_are_no_answer(row):
    (thoughts,) = row
    whole = thoughts.replace("%s", "it would be right if ... Final Score: 5")
    assert scores_in(Said(f"{whole}\nFinal Score: 2", "stop"), *FINAL) == [2.0]
    with pytest.raises(Unread, match="no text after its thoughts"):
        scores_in(Said(whole, "stop"), *FINAL)
    if not thoughts.startswith("%s"):
        with pytest.raises(Unread, match="no end"):
            scores_in(Said(whole.partition(" ...")[0] + "\nFinal Score: 5", "stop"), *FINAL)


ENDED = """
length -> cut off .finish_reason: length.; give it more max_tokens
max_tokens -> cut off
content_filter -> did not end by itself .finish_reason: content_filter
"""


def test_an_answer_counts_that_ended_by_itself():
    """In others a number may be cut in two: 1 of 10."""
    for ended in ("stop", "end_turn", "eos_token", "stop_sequence"):
        assert scores_in(Said("Final Score: 1", ended), *FINAL) == [1.0]
    for ended, why in rows(ENDED):
        with pytest.raises(Unread, match=why):
            scores_in(Said("Final Score: 1", ended), *FINAL)


COMBINED = """
edit -> 8 2 4 -> 2.8284271247
edit -> 2 8 4 -> 2.8284271247
edit -> 0 8 9 -> 0
aspects -> 2.694700002670288 2.371500015258789 2.5 -> 2.522066672643
"""


@pytest.mark.parametrize(("form", "numbers", "score"), rows(COMBINED))
def test_scores_of_several_names_are_combined(form, numbers, score):
    """An edit is no better than its worst part; aspects, decimals as UnifiedReward 2.0 writes them
    (its point_score_ACS_image_generation.py), are averaged."""
    of, numbers = FORMS[form], numbers.split()
    lines = [f"**{name} (1-5):** {n}" for name, n in zip(of.scores, numbers, strict=True)]
    for between in ("\n", ", ", " | "):
        values = scores_in(Said(between.join(lines), "stop"), of.scores, of.low, of.high)
        assert of.combine(values) == pytest.approx(float(score))
