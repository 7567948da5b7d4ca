#!/usr/bin/env bash
# Re-creates requirements.lock: the newest versions that pyproject.toml admits, resolved once per supported Python.
#
#     bash tools/lock.sh [PYTHON...]          default: python3.11 python3.12 python3.13
#
# The lock is a constraints file, `pip install -c requirements.lock -e ".[test]"`. A version that differs between
# Pythons carries a marker; Pythons older or newer than those given take the nearest one's. Nothing is installed,
# package metadata alone is read. The extra `gpu` is left out: the CUDA libraries of JAX and of PyTorch have to be
# chosen by whichever of the two is installed.
set -euo pipefail

repository="$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)"
extras="gcs,hub,instruct,tasks,test,tpu"
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

[ $# -gt 0 ] || set -- python3.11 python3.12 python3.13
for python in "$@"; do
    version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
    echo "resolving for Python $version"
    "$python" -m venv "$scratch/venv-$version"
    "$scratch/venv-$version/bin/python" -m pip install --quiet --disable-pip-version-check --dry-run \
        --ignore-installed --report "$scratch/$version.json" "$repository[$extras]"
done

"$scratch/venv-$version/bin/python" - "$scratch" "$repository/requirements.lock" <<'PYTHON'
import collections, itertools, json, os, pathlib, re, sys

scratch, lock = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
reports = sorted(scratch.glob("*.json"), key=lambda path: [int(part) for part in path.stem.split(".")])
pythons = [path.stem for path in reports]

pins = collections.defaultdict(dict)  # package -> {python: version}
for python, path in zip(pythons, reports):
    for item in json.loads(path.read_text())["install"]:
        if "dir_info" in item["download_info"]:
            continue  # this package itself
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        pins[name][python] = item["metadata"]["version"].partition("+")[0]  # a local build satisfies the public version

lines = [f"# Written by tools/lock.sh for Python {', '.join(pythons)}; do not edit."]
for name, versions in sorted(pins.items()):
    if len(set(versions.values())) == 1:
        lines.append(f"{name}=={next(iter(versions.values()))}")
        continue
    for version, run in itertools.groupby(range(len(pythons)), lambda index: versions.get(pythons[index])):
        first, *_, last = [*run] * 2
        bounds = [f'python_version >= "{pythons[first]}"'] if first > 0 else []
        bounds += [f'python_version < "{pythons[last + 1]}"'] if last + 1 < len(pythons) else []
        if version is not None:
            lines.append(f"{name}=={version} ; {' and '.join(bounds)}")

aside = lock.with_name(lock.name + ".tmp")
aside.write_text("\n".join(lines) + "\n")
os.replace(aside, lock)
print(f"{lock}: {len(pins)} packages")
PYTHON
