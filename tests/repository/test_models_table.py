"""The table of docs/models.md is that of the catalogue, and says nothing that the tests of every
class do not assert."""

import re

import pytest

from g2rpo.policies.catalogue import SPECS
from g2rpo.policies.pipelines import deployed_shift
from tests.policies.test_flux import SCHEDULERS
from tests.repository.models_table import COLUMNS, PAGE, guidance_of, rows_in
from tests.support.tiny_pipelines import CLASSES

ROWS = rows_in(PAGE.read_text())


def test_every_class_that_is_described_is_tested_and_in_the_table():
    assert list(ROWS) == list(CLASSES)
    # klein's parent, whose text encoder no tiny model can be
    assert set(SPECS) == {*CLASSES, "Flux2Pipeline"}


@pytest.mark.parametrize("kind", CLASSES)
def test_a_row_is_what_is_described_and_within_what_is_asserted(kind):
    guidance, *errors = ROWS[kind]
    assert guidance == guidance_of(kind)
    assert all(
        float(error) <= 10 * limit for error, limit in zip(errors, COLUMNS.values(), strict=True)
    )


def test_the_shifts_in_the_text_are_flux_devs():
    said = dict(re.findall(r"([\d.]+) at (\d+)x", PAGE.read_text(encoding="utf-8")))
    assert {
        float(shift): int(size) for shift, size in said.items() if size in ("512", "720", "1024")
    } == {
        round(deployed_shift(SCHEDULERS["dev"], (size // 16) ** 2), 2): size
        for size in (512, 720, 1024)
    }
