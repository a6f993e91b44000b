"""Cases of a test as text, a line each."""


def rows(text: str) -> list[tuple[str, ...]]:
    r"""The parts of every line, with " -> " between them; `\n` is a new line."""
    return [tuple(line.replace(r"\n", "\n").split(" -> ")) for line in text.strip().splitlines()]
