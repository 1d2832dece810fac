#!/usr/bin/env bash
# Make a fresh virtual environment in .venv-test, install this package and its development tools there, run the tests.
# Arguments go to pytest, which runs one process a core (-n 0 for one process in all). With --oldest as the first one, every dependency is installed at its lower bound.
# PYTHON names another interpreter than python3.
set -euo pipefail
cd "$(dirname "$0")/.."

constraints=()
if [ "${1:-}" = --oldest ]; then
  shift
  "${PYTHON:-python3}" scripts/lower_bounds.py > .venv-test-constraints.txt
  constraints=(--constraint .venv-test-constraints.txt)
fi
echo "installing into .venv-test"
"${PYTHON:-python3}" -m venv --clear .venv-test
.venv-test/bin/python -m pip install --quiet ${constraints[@]+"${constraints[@]}"} --editable '.[dev]'
exec .venv-test/bin/python -m pytest -n auto "$@"
