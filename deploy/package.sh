#!/usr/bin/env bash
# What is published, in dist/: an sdist, and a wheel with CPU kernels for all processors of this machine's kind. The wheel
# is made of the sdist, installed in a new environment, and tried there. Run on x86-64 and on ARM, on the oldest
# distribution that is to be served: the wheel's tag says which C library its kernels need.
#
#     make package        # or deploy/package.sh PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
root=$PWD
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1
# What pip prints of its own is of no use here, unless it fails.
quietly() { "$@" > "$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }; }

quietly "$python" -m venv "$work/tools"
quietly "$work/tools/bin/pip" install build twine auditwheel wheel
rm -rf dist
quietly "$work/tools/bin/python" -m build --sdist --outdir dist .
tar -xzf dist/kvern-*.tar.gz -C "$work"
source=$(echo "$work"/kvern-*)

PYTHONPATH=$source/src "$python" -m kvern.cpu.build
quietly "$work/tools/bin/python" -m build --wheel --outdir "$work/wheel" "$source"
tag=$("$work/tools/bin/auditwheel" show "$work"/wheel/*.whl 2> /dev/null | grep -o 'manylinux_[0-9]*_[0-9]*_[a-z0-9_]*' | head -1)
quietly "$work/tools/bin/wheel" tags --remove --platform-tag "$tag" "$work"/wheel/*.whl
mv "$work"/wheel/*.whl dist/
"$work/tools/bin/twine" check --strict dist/*

quietly "$python" -m venv "$work/new"
quietly "$work/new/bin/pip" install --no-compile "torch==$(sed -n 's/^torch==//p' constraints.txt)"
quietly "$work/new/bin/pip" install --no-compile -c constraints.txt dist/*.whl
cd "$source"  # the files that the smoke test reads; the package is the one that was installed
rm -rf src/kvern/cpu/ready_made
"$work/new/bin/python" -c "import kvern, sys; sys.exit(not kvern.__file__.startswith('$work/new'))"
"$work/new/bin/python" tests/support/smoke.py
# Without a compiler there are no kernels but the wheel's.
CXX=none XDG_CACHE_HOME=$work/cache "$work/new/bin/python" -c "
from kvern import LLM
from kvern.cpu import library
with LLM('kvern-1m', threads=1) as llm:
    llm.generate('Once')
assert library._loaded is not None, 'the kernels of the wheel are not used'"
cd "$root"
ls -l dist
