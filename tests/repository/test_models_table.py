"""The tables of docs/models.md: the classes of the catalogue with their guidance, and FLUX's
shifts."""

import re

from g2rpo.models.catalogue import SPECS
from g2rpo.models.pipelines import deployed_shift
from tests.models.test_flux import SCHEDULERS
from tests.support.pages import ROOT
from tests.support.tiny_pipelines import CLASSES

PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


def test_the_table_has_every_class_that_is_tested_with_its_guidance():
    rows = re.findall(r"^\| `(\w+Pipeline)` \| ([\d.]+) \| ?([\d.]*) \|", PAGE, re.MULTILINE)
    assert [kind for kind, *_ in rows] == list(CLASSES)
    # klein's parent, whose text encoder no tiny model can be
    assert set(SPECS) == {*CLASSES, "Flux2Pipeline"}
    for kind, guidance, off in rows:
        spec = SPECS[kind]
        assert float(guidance) == spec.guidance, kind
        assert (float(off) if off else None) == spec.unguided, kind


def test_the_shifts_in_the_text_are_flux_devs():
    said = {int(size): float(shift) for shift, size in re.findall(r"([\d.]+) at (\d+)x", PAGE)}
    for size in (512, 720, 1024):
        assert said[size] == round(deployed_shift(SCHEDULERS["dev"], (size // 16) ** 2), 2)
