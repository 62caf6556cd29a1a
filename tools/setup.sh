#!/usr/bin/env bash
# Creates .venv and installs pdmesh into it. Usage: tools/setup.sh runtime|dev
#
# runtime: what the nodes, the command line and the demo need.   dev: that, and what `make check` needs.
# Re-running is cheap: dependencies are installed again only when pyproject.toml changed.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=${1:-dev}
case "$profile" in
  runtime) extras=cpu,compute ;;
  dev) extras=cpu,compute,dev ;;
  *) echo "setup: unknown profile '$profile' (runtime or dev)" >&2; exit 2 ;;
esac

venv=.venv
started=$SECONDS
step() { printf '\033[1m==>\033[0m %s  (%ss)\n' "$1" "$((SECONDS - started))"; }
fail() { printf 'setup: %s\n' "$1" >&2; exit 1; }

# Debian packages, each with the thing that proves it is there.
missing_packages() {
  local python=${PYTHON:-python3.11}
  command -v "$python" >/dev/null || echo python3.11
  if command -v "$python" >/dev/null; then
    "$python" -c 'import ensurepip' 2>/dev/null || echo python3.11-venv
    "$python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || echo python3.11-dev
  fi
  command -v g++ >/dev/null || echo g++
  command -v cmake >/dev/null || echo cmake
  command -v make >/dev/null || echo make
  # The Mooncake data plane is linked against these.
  local libraries; libraries=$(ldconfig -p 2>/dev/null || /sbin/ldconfig -p)
  grep -q 'libibverbs\.so\.1' <<<"$libraries" || echo libibverbs1
  grep -q 'libnuma\.so\.1' <<<"$libraries" || echo libnuma1
  grep -q 'libcurl\.so\.4' <<<"$libraries" || echo libcurl4
  if [ "$profile" = dev ]; then
    [ -e /usr/include/gtest/gtest.h ] || echo libgtest-dev
  fi
}

packages=$(missing_packages | tr '\n' ' ')
if [ -n "$packages" ]; then
  install="apt-get install -y --no-install-recommends $packages"
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    fail "these Debian packages are missing; install them and run this again:  sudo $install"
  fi
  step "installing system packages: $packages"
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive $install -qq >/dev/null
fi

python=${PYTHON:-python3.11}
if [ ! -x $venv/bin/python ]; then
  step "creating $venv"
  "$python" -m venv $venv
fi

pip() { $venv/bin/python -m pip --disable-pip-version-check --quiet "$@"; }
requirements() { # build requirements, dependencies and the extras of this profile, one a line
  $venv/bin/python - "$extras" <<'PY'
import sys, tomllib
with open("pyproject.toml", "rb") as file:
    config = tomllib.load(file)
wanted = config["build-system"]["requires"] + config["project"]["dependencies"]
for extra in sys.argv[1].split(","):
    wanted += config["project"]["optional-dependencies"][extra]
print("\n".join(wanted))
PY
}

# A runtime profile is satisfied by a dev environment, not the other way round.
wanted=$(requirements | sha256sum | cut -c1-64)
dev_wanted=$(extras=cpu,compute,dev requirements | sha256sum | cut -c1-64)
installed=$(cat $venv/.installed 2>/dev/null || true)
if [ "$installed" != "$wanted" ] && [ "$installed" != "$dev_wanted" ]; then
  # The pinned build first: with torch absent, another package could pull in a much larger one.
  step "installing $(requirements | grep '^torch==')"
  pip install "$(requirements | grep '^torch==')"
  step "installing $(requirements | wc -l) direct dependencies ($profile)"
  requirements >$venv/.requirements
  pip install -r $venv/.requirements
  echo "$wanted" >$venv/.installed
fi

# Native code, generated protos and package metadata; Python sources are used in place.
sources=$({ find CMakeLists.txt pyproject.toml protos scheduler_core/CMakeLists.txt scheduler_core/csrc scheduler_core/bindings \
              model_runtime/kernels -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum; } | sha256sum | cut -c1-64)
if [ "$(cat $venv/.built 2>/dev/null || true)" != "$sources" ]; then
  step "building native code and protos"
  CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} pip install --no-build-isolation --no-deps -e .
  echo "$sources" >$venv/.built
fi
step "ready"
