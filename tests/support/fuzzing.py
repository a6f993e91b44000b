"""Inputs that are nearly right: what people, disks and attackers make of a recipe, an override, a
file or an answer."""

from hypothesis import strategies as st

from g2rpo.config import recipes
from g2rpo.config.algorithms import ALGORITHMS
from g2rpo.config.resolve import resolve

PLAIN = r"""
!!python/object/apply:os.system [false]
!!binary /w==
!!int x
!!set {a}
!x y
&a [*a]
*a
<<: {a: 1}
{a: 1, a: 2}
0b_
2024-13-45
1:30
1e400
.nan
-.inf
"\ud800"
"\0"
[/red]
[bold
=
~
''
[]
{}
-1
0
1.5
true
off
~nobody/x
/dev/zero
../../x
é
日本
💥
"""
SNIPPETS = (
    *PLAIN.strip().splitlines(),
    *("[" * 3000, "{a: " * 500, "9" * 5000, "0x" + "f" * 5000, "x" * 5000, "", "\t"),
    *("\ud800", "\x1b[31m", "\u2028", "\x85", "\ufeff", "%YAML 3.0\n---\n", "---\n", "? [a]\n"),
)

CONFIGS = [resolve(recipes.recipe_settings(name)) for name in recipes.names()]


def _keys(data, prefix=""):
    for key, value in data.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


KEYS = sorted({key for config in CONFIGS for key in _keys(config.model_dump(mode="json"))})
WORDS = "auto full cosine testbed testbed:train bfloat16 scene_accuracy [1,2] [0] 3"
KNOWN = (*ALGORITHMS, *WORDS.split())

numbers = st.integers(-3, 40).map(str) | st.integers().map(str) | st.floats().map(repr)
values = st.sampled_from(SNIPPETS) | st.sampled_from(KNOWN) | numbers | st.text(max_size=20)


PIECES = st.sampled_from(SNIPPETS) | st.text(max_size=8)


@st.composite
def mutated(draw, text, pieces=PIECES, most=3):
    """`text` (str or bytes) with a few pieces cut out, put in, doubled or moved."""
    for _ in range(draw(st.integers(0, most))):
        start = draw(st.integers(0, len(text)))
        stop = min(len(text), start + draw(st.integers(0, 12)))
        how = draw(st.sampled_from(["cut", "insert", "replace", "double", "end"]))
        cut = text[start:stop]
        new = (
            draw(pieces)
            if how in ("insert", "replace")
            else 2 * cut
            if how == "double"
            else cut[:0]
        )
        after = text[start if how == "insert" else stop :]
        text = text[:start] + new + (cut[:0] if how == "end" else after)
    return text


keys = st.sampled_from(KEYS) | st.sampled_from(KEYS).flatmap(
    lambda key: mutated(key, st.text(max_size=3), most=2)
)
overrides = st.lists(st.builds("{}={}".format, keys, values) | st.text(max_size=30), max_size=4)
recipe_texts = st.sampled_from(recipes.names()).flatmap(lambda name: mutated(recipes.text(name)))
