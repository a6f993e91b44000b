"""The table of docs/models.md is that of the catalogue, and says nothing that the tests of every class do not assert."""

import pytest

from g2rpo.policies.catalogue import SPECS
from tests.repository.models_table import LIMITS, PAGE, guidance_of, rows_in
from tests.support.tiny_pipelines import CLASSES

ROWS = rows_in(PAGE.read_text())


def test_every_class_that_is_described_is_tested_and_in_the_table():
    assert list(ROWS) == list(CLASSES)
    assert set(SPECS) == {*CLASSES, "Flux2Pipeline"}  # klein's parent, whose text encoder no tiny model can be


@pytest.mark.parametrize("kind", CLASSES)
def test_a_row_is_what_is_described_and_within_what_is_asserted(kind):
    guidance, *errors = ROWS[kind]
    assert guidance == guidance_of(kind)
    assert all(float(error) <= 10 * limit for error, limit in zip(errors, LIMITS, strict=True))
