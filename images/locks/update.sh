#!/bin/sh
# The packages of each image, with hashes: parts of requirements.lock, so that an image has the versions that the tests ran
# with. Run after `make lock`; needs uv. A test holds that no pin differs from requirements.lock.
set -eu
cd "$(dirname "$0")/../.."
lock() { # name arguments...
  name=$1
  shift
  uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url --no-header --no-annotate \
    --constraint requirements.lock --output-file "images/locks/$name.lock" "$@"
}
lock build requirements.build.in
lock operator pyproject.toml --extra operator
lock trainer-cpu pyproject.toml --extra trainer --extra examples
lock trainer-cuda pyproject.toml images/locks/cuda.in --extra trainer --extra examples
lock trainer-serving pyproject.toml --extra serving --extra examples
