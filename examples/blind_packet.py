"""A page on which other people compare base and tuned pictures without knowing which is which.

python examples/blind_packet.py make runs/mine prompts.txt look     # writes look.html to send, and look.key.json to keep
python examples/blind_packet.py count look.key.json ada.json ben.json        # the files that the page saves

Both pictures of a pair start from the same noise. Which of them is on the left is drawn by a secret seed.
"""

import base64
import html
import io
import json
import secrets
import sys
from pathlib import Path

from PIL import Image
from scipy.stats import binomtest

from g2rpo import api

PAGE = """<!doctype html>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Which picture is better?</title>
<style>
  body {{ font: 16px sans-serif; max-width: 50em; margin: auto; padding: 1em }}
  img {{ width: 49%; image-rendering: pixelated }}
  label {{ margin-right: 1em }}
</style>
<h1>Which picture is better?</h1>
{pairs}
<button>Save the answers as a file</button>
<script>
document.querySelector("button").onclick = () => {{
  const answers = {{}};
  for (const chosen of document.querySelectorAll("input:checked")) answers[chosen.name] = chosen.value;
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([JSON.stringify(answers)], {{ type: "application/json" }}));
  link.download = "answers.json";
  link.click();
}};
</script>
"""
PAIR = """<h2>{number}. {prompt}</h2>
<p><img src="{left}" alt="left"> <img src="{right}" alt="right"></p>
<p>{choices}</p>
"""
CHOICE = '<label><input type="radio" name="{number}" value="{answer}"> {answer}</label>'


def make(run: str, prompts: str, name: str) -> None:
    """Writes NAME.html, and NAME.key.json with the side of each tuned picture."""
    texts = [text for text in Path(prompts).read_text("utf-8").splitlines() if text.strip()]
    base, tuned = api.sample(run, texts, base=True), api.sample(run, texts)
    sides, pairs = [], []
    for number, text in enumerate(texts):
        sides.append(secrets.choice(["left", "right"]))
        pictures = [base[number], tuned[number]]
        if sides[number] == "left":
            pictures.reverse()
        left, right = map(data_uri, pictures)
        choices = " ".join(
            CHOICE.format(number=number, answer=answer) for answer in ("left", "right", "same")
        )
        pairs.append(
            PAIR.format(
                number=number + 1, prompt=html.escape(text), left=left, right=right, choices=choices
            )
        )
    Path(f"{name}.key.json").write_text(json.dumps(sides), "utf-8")
    Path(f"{name}.html").write_text(PAGE.format(pairs="\n".join(pairs)), "utf-8")
    print(f"{name}.html: send this file. {name}.key.json: keep this one")


def data_uri(picture) -> str:
    """A picture [3, H, W] in [0, 1] within a page."""
    out = io.BytesIO()
    pixels = picture.mul(255).round().byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def count(key: str, *answers: str) -> None:
    """Prints how often the tuned picture was preferred, with Clopper and Pearson's 95 % interval,
    which takes every answer as independent."""
    sides = json.loads(Path(key).read_text("utf-8"))
    tuned = decided = 0
    for file in answers:
        for number, answer in json.loads(Path(file).read_text("utf-8")).items():
            if answer != "same":
                decided += 1
                tuned += answer == sides[int(number)]
    if not decided:
        print("nobody preferred a picture")
        return
    interval = binomtest(tuned, decided).proportion_ci(0.95)
    share = f"{tuned / decided:.2f} [{interval.low:.2f}, {interval.high:.2f}]"
    print(f"tuned was preferred in {tuned} of {decided} answers: {share}; .5 is chance")


if __name__ == "__main__":
    commands = {"make": make, "count": count}
    if len(sys.argv) < 4 or sys.argv[1] not in commands:
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
