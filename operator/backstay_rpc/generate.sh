#!/bin/sh
# Regenerates the Python code of control.proto; tests/rpc holds that what is committed is fresh.
set -eu
cd "$(dirname "$0")/.."
python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. backstay_rpc/control.proto
