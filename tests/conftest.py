import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


@pytest.fixture(scope="session")
def flux_directory(tmp_path_factory):
    from tests.tiny import save_flux

    return save_flux(tmp_path_factory.mktemp("models") / "flux")


@pytest.fixture(scope="session")
def sd3_directory(tmp_path_factory):
    from tests.tiny import save_sd3

    return save_sd3(tmp_path_factory.mktemp("models") / "sd3")
