#!/usr/bin/env bash
# Installs what building and testing tessera needs, by the names of Debian's packages.
set -euo pipefail

packages=(
  g++ cmake ninja-build ccache
  libeigen3-dev nlohmann-json3-dev libfmt-dev libcli11-dev libgloo-dev libisal-dev
  libboost-context-dev doctest-dev
)

if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  cat <<EOF
usage: tools/setup.sh

Installs the packages below if they are missing (Debian 12 or newer, Ubuntu 24.04 or newer), with
sudo unless you are root. Does nothing if all are there.

  ${packages[*]}
EOF
  exit 0
elif [[ $# -gt 0 ]]; then
  echo "setup: unknown argument '$1'; see tools/setup.sh --help" >&2
  exit 2
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  cat >&2 <<EOF
setup: this is no Debian or Ubuntu system, so nothing was installed. Install what your system calls
these packages, then go on with tools/test.sh --no-setup (CMake names what it misses):

  ${packages[*]}

Needed: g++ 12 or newer, CMake 3.25, Eigen 3.4, nlohmann-json 3.11, fmt 9, CLI11 2, doctest 2.4,
Gloo, ISA-L, Boost.Context 1.71 (for the tests).
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
install=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends
         "${missing[@]}")
# The package lists may be missing (a fresh container) or old.
if ! "${install[@]}" </dev/null; then
  echo "setup: updating the package lists and trying again"
  "${as_root[@]}" apt-get update </dev/null
  "${install[@]}" </dev/null
fi
echo "setup: done"
