"""Every change of tools/mutations.py is of text that is there, once."""

from tools.mutations import MUTATIONS, PACKAGE, ROOT


def test_every_change_has_its_place():
    for mutation in MUTATIONS:
        text = (ROOT / PACKAGE / mutation.file).read_text(encoding="utf-8")
        assert mutation.applied(text) != text
        assert (ROOT / mutation.tests.split()[0].partition("::")[0]).exists()
