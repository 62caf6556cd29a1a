#!/usr/bin/env bash
# Builds the image of routers and runs it as the chart does, where containers can be built and run on this machine.
#
# Where they cannot, it says `image: NOT BUILT` or `NOT RUN` and why, and succeeds; a build that was begun must end well.
# The wheels are made outside of it, out of what `make setup` has compiled and with pip as it is set up here: both have to
# be of the Debian and the Python of the image. CI=true lets it install what it needs.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=build/image
log=$folder/log
image=localhost/pdmesh-check
python=.venv/bin/python
release_and_python='import platform, sys; print(platform.freedesktop_os_release().get("VERSION_CODENAME"), *sys.version_info[:2])'
started=$SECONDS
leave() { echo "image: $1"; exit 0; }
fail() { tail -40 "$log" >&2; echo "image: $1 (all of its output: $log)" >&2; exit 1; }
last_line() { grep -v '^ *$' "$log" | tail -1 | sed -E 's/^.{10,}(.{160})$/...\1/'; }

rm -rf $folder
mkdir -p $folder
: >"$log"

made_for=$("$python" -c "$release_and_python")
if [ "$made_for" != 'bookworm 3 11' ]; then
  leave "NOT BUILT: it takes wheels of Debian bookworm and Python 3 11, those of this machine are of $made_for"
fi

missing() {
  command -v podman >/dev/null || echo podman
  command -v runc >/dev/null || command -v crun >/dev/null || echo runc
  command -v mmdebstrap >/dev/null || echo mmdebstrap
}
packages=$(missing | tr '\n' ' ')
if [ -n "$packages" ] && [ -n "${CI:-}" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  # shellcheck disable=SC2086
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $packages; } >>"$log" 2>&1 ||
    leave "NOT BUILT: these Debian packages cannot be installed: $packages"
fi
command -v podman >/dev/null || leave "NOT BUILT: podman is not installed"
podman info >/dev/null 2>>"$log" || leave "NOT BUILT: podman does not work here: $(last_line)"

base=$(tools/image_base.sh 2>>"$log") || leave "NOT BUILT: $(last_line)"

# Long enough for a busy machine, and an end where a mirror hangs.
build() { timeout 1200 podman build --isolation chroot --network host --layers=false "$@" >>"$log" 2>&1; }
forget() { podman rmi --force "$image" >/dev/null 2>&1 || true; }
trap forget EXIT
build -t "$image" - <<<"FROM $base"$'\n''RUN true' || leave "NOT BUILT: podman builds nothing here: $(last_line)"
forget

"$python" -m pip wheel --no-build-isolation --wheel-dir $folder/wheels . >>"$log" 2>&1 || fail "pip makes no wheels"
build --build-arg "BASE=$base" --build-context "build=$folder" --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels \
  -f Containerfile --target router -t "$image" . || fail "the build failed"
size=$(podman image inspect --format '{{.Size}}' "$image")
built="built in $((SECONDS - started)) s with $((size / 1000000)) MB"

runs() { podman run --rm --network none --entrypoint /bin/true "$image" >>"$log" 2>&1; }
if ! runs; then
  # Where limits cannot be raised, and without systemd, podman starts nothing by its defaults.
  cat >$folder/containers.conf <<'CONF'
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
CONF
  export CONTAINERS_CONF=$PWD/$folder/containers.conf
  runs || leave "NOT RUN, only $built: $(last_line)"
fi
PDMESH_TEST_IMAGE=$image "$python" -m pytest -q -p no:cacheprovider tests/helm/test_router_container.py >>"$log" 2>&1 ||
  fail "$built, but it does not run as the chart runs it"
echo "image: $built; run read-only, as its own user, by the chart's arguments"
