#!/usr/bin/env bash
# Runs fast tests with the oldest versions that pyproject.toml allows. Needs uv.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
uv pip compile --quiet --resolution lowest-direct --python-version 3.11 pyproject.toml --output-file "$work/oldest.txt"
uv venv --quiet --python 3.11 "$work/venv"
uv pip install --python "$work/venv/bin/python" --requirement "$work/oldest.txt" "pytest>=8" hypothesis
PYTHONPATH=src OMP_NUM_THREADS=1 "$work/venv/bin/python" -m pytest -q \
    tests/core/test_flow.py tests/core/test_objectives.py tests/core/test_seeding.py tests/rollout/test_engine.py tests/config/test_config.py \
    tests/models/test_flux.py tests/models/test_sd3.py tests/train/test_trainer.py tests/train/test_learner.py \
    tests/train/test_resume.py
