#!/usr/bin/env bash
# Gets what the tests of the router's page in a browser need: Chromium of the system, and playwright in .venv.
#
# Where neither is to be had it says why and succeeds: those tests are skipped then, and say so.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
log=$venv/setup-browser.log
without() { echo "setup-browser: $1; the tests in a browser are skipped (output: $log)" >&2; exit 0; }

mkdir -p $venv
: >"$log"
if ! command -v chromium >/dev/null && ! command -v chromium-browser >/dev/null; then
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    without "no Chromium here, and installing it takes root: sudo apt-get install chromium"
  fi
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium; } >>"$log" 2>&1 ||
    without "Chromium cannot be installed"
fi
if ! $venv/bin/python -c 'import playwright' 2>/dev/null; then
  export PIP_PROGRESS_BAR=off PIP_DISABLE_PIP_VERSION_CHECK=1
  wanted=$($venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["browser"])')
  $venv/bin/python -m pip install --no-compile "$wanted" >>"$log" 2>&1 || without "playwright cannot be installed"
fi
$(command -v chromium || command -v chromium-browser) --version 2>/dev/null
