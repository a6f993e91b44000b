"""Prompts with input pictures."""

from PIL import Image

from g2rpo.core.data import Prompt


def edits(folder, **greys):
    """A prompt "make it NAME" for each name, with input pictures of these greys, in [0, 1], of
    different sizes."""
    prompts = []
    for name, values in greys.items():
        paths = [folder / f"{name}{place}.png" for place in range(len(values))]
        for place, (path, value) in enumerate(zip(paths, values, strict=True)):
            Image.new("RGB", (24 + len(name), 20 + place), (round(255 * value),) * 3).save(path)
        prompts.append(Prompt(f"make it {name}", [str(path) for path in paths]))
    return prompts
