import pytest

from tests.lab.demo.trained import train_tiny


@pytest.fixture(scope="package")
def run(tmp_path_factory, flux_directory):
    return train_tiny(tmp_path_factory.mktemp("tiny"), flux_directory)
