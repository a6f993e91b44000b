#!/usr/bin/env bash
# Builds sdist and wheel (the wheel from the sdist), and installs the wheel into an empty environment, where it must run.
#   tools/check_release.sh           dependencies from the package index
#   tools/check_release.sh PYTHON    dependencies of that interpreter's environment, nothing is downloaded
set -euo pipefail
cd "$(dirname "$0")/.."
have=${1:-}
python=${have:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

rm -rf dist
if [ -n "$have" ]; then
    "$have" -m build --no-isolation
else
    "$python" -m venv "$work/build"
    "$work/build/bin/pip" install --quiet build twine cyclonedx-bom
    "$work/build/bin/python" -m build
    "$work/build/bin/twine" check --strict dist/*
fi

"$python" -m venv "$work/clean"
if [ -n "$have" ]; then # that environment's packages, without its editable g2rpo
    "$have" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$("$work/clean/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
    "$work/clean/bin/pip" install --quiet --no-deps --no-index dist/*.whl
else
    "$work/clean/bin/pip" install --quiet --constraint constraints.txt dist/*.whl
    "$work/clean/bin/pip" check
    mkdir -p build
    "$work/build/bin/cyclonedx-py" environment --output-reproducible -o build/sbom.json "$work/clean/bin/python" # names, versions, licences
    for extra in data demo ocr quantized serve video wandb trackio docs dev; do
        "$work/clean/bin/pip" install --quiet --dry-run "$(echo dist/*.whl)[$extra]"
    done
fi

cd "$work" # not the clone: only what is installed can be imported
export HOME=$work G2RPO_CACHE=$work/cache
bin=$work/clean/bin
"$bin/python" - "$work" <<'PYTHON'
import importlib.metadata, pathlib, sys, g2rpo
where = pathlib.Path(g2rpo.__file__)
assert where.is_relative_to(sys.argv[1]), f"imported from {where}"
assert (where.parent / "py.typed").is_file()
assert importlib.metadata.version("g2rpo") == g2rpo.__version__
PYTHON
"$bin/g2rpo" --version
"$bin/g2rpo" recipes
"$bin/g2rpo" train scenes algorithm.group_size=2 sampling.num_steps=6 algorithm.branch_steps="[0]" "algorithm.granularities=[1]" \
    trainer.iterations=1 trainer.prompts_per_iteration=1 evaluation.num_prompts=2 --run-dir "$work/run"
"$bin/g2rpo" report "$work/run"
test -s "$work/run/report.html"
echo "the wheel runs"
