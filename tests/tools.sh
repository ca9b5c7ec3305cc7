#!/bin/sh
# Installs the programs that some tests use, into .tools/bin where `make` finds them. Go installs helm and kubeconform.
# For root, apt installs prometheus, promtool and kubectl. The last line names the programs that could not be installed.
# Their tests are skipped, or fail under BACKSTAY_REQUIRE_TOOLS=1.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .tools/bin
export GOBIN="$PWD/.tools/bin" GOFLAGS=-buildvcs=false
have() { [ -x ".tools/bin/$1" ] || command -v "$1" >/dev/null 2>&1; }
with_go() { # name module@version
  have "$1" && return 0
  command -v go >/dev/null 2>&1 || return 0
  echo "installing $1 ($2)"
  go install "$2" || true
}
with_apt() { # name package
  have "$1" && return 0
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 0
  echo "installing $1 (package $2)"
  [ -e .tools/apt-updated ] || { apt-get update -qq && touch .tools/apt-updated; } || true
  # Without a runlevel of 1, the package would start a service. The tests start their own.
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$2" >/dev/null || true
}
with_go helm helm.sh/helm/v3/cmd/helm@v3.22.0
with_go kubeconform github.com/yannh/kubeconform/cmd/kubeconform@v0.8.0
with_apt kubectl kubectl
with_apt kubectl kubernetes-client
with_apt prometheus prometheus
with_apt promtool prometheus
missing=
for tool in helm kubeconform kubectl prometheus promtool; do have "$tool" || missing="$missing $tool"; done
[ -z "$missing" ] || echo "not installed:$missing"
