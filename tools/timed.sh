#!/usr/bin/env bash
# Runs a command and notes under a name what it took: tools/timed.sh NAME COMMAND...
# Shows what was noted, with the sum of the processor time and what a part said it could not do (`part: NOT DONE: why`):
# tools/timed.sh --table ELAPSED_S
set -uo pipefail
notes=build/times
mkdir -p build

if [ "$1" = --table ]; then
  printf '\n%-28s %9s %11s\n' part elapsed processor
  awk -F '\t' -v elapsed="$2" '
    { printf "%-28s %7.0f s %9.0f s\n", $1, $2, $3; processor += $3 }
    END { printf "%-28s %7.0f s %9.0f s\n", "all, side by side", elapsed, processor }' $notes
  left_out=$(grep -h -E '^[a-z]+: NOT [A-Z]+' build/*.log 2>/dev/null)
  if [ -n "$left_out" ]; then printf '\n%s\n' "$left_out"; fi
  exit
fi

name=$1
shift
said=$(mktemp)
trap 'rm -f "$said"' EXIT
TIMEFORMAT='%R %U %S'
{ time "$@" 2>&3; } 3>&2 2>"$said"
status=$?
read -r elapsed user system <"$said"
printf '%s\t%s\t%s\n' "$name" "$elapsed" "$(awk "BEGIN { print $user + $system }")" >>$notes
exit $status
