#!/usr/bin/env bash
# Prints the name of an image that the Containerfile can begin with: the one it names or, where no registry can be reached,
# one made here of Debian packages, from the mirrors that this machine uses itself. Usage: tools/image_base.sh
#
#   make image BUILD_ARGS="--build-arg BASE=$(tools/image_base.sh)"
set -euo pipefail
cd "$(dirname "$0")/.."

named=$(sed -n 's/^ARG BASE=//p' Containerfile)
suite=${named##*:}
suite=${suite%-slim}
made=localhost/pdmesh-base:$suite
fail() { echo "$1" >&2; exit 1; }

for image in "$named" "$made"; do
  if podman image exists "$image"; then echo "$image"; exit; fi
done
if timeout 60 podman pull --quiet "$named" >&2; then echo "$named"; exit; fi
command -v mmdebstrap >/dev/null || fail "$named cannot be pulled, and mmdebstrap, which makes another one, is not installed"

# None of them: this is no Debian of that release, and mmdebstrap knows where Debian's own are.
mirrors() {
  command -v apt-get >/dev/null || return 0
  # shellcheck disable=SC2016
  apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' 2>/dev/null |
    grep " $suite" | sort -u || true
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mirrors >"$folder/sources.list"
sources=()
if [ -s "$folder/sources.list" ]; then sources=("$folder/sources.list"); fi
# Without what nobody reads in a container, as in the image of the registry.
if ! mmdebstrap --variant=minbase --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/locale/*' \
  --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-include=/usr/share/doc/*/copyright' \
  "$suite" "$folder/base.tar" "${sources[@]}" >"$folder/log" 2>&1; then
  cat "$folder/log" >&2
  fail "$named cannot be pulled, and mmdebstrap makes no other one: $(tail -1 "$folder/log")"
fi
podman import --quiet --change 'CMD ["bash"]' "$folder/base.tar" "$made" >&2
echo "$made"
