#!/bin/sh
# Installs the programs that some tests use, into .tools/bin where `make` finds them. Go installs helm and kubeconform.
# It builds kube-apiserver and etcd from the modules that tests/tools/go.sum pins: 3 to 10 minutes on two cores, once.
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
from_modules() { # name package flags
  [ -x ".tools/bin/$1" ] && [ ".tools/bin/$1" -nt tests/tools/go.sum ] && return 0
  command -v go >/dev/null 2>&1 || return 0
  echo "building $1 ($2)"
  go build -C tests/tools -trimpath -ldflags "-s -w $3" -o "$GOBIN/$1" "$2" && touch ".tools/bin/$1" || true
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
kubernetes=$(sed -n 's#^.*k8s.io/kubernetes \(v[0-9.]*\).*#\1#p' tests/tools/go.mod)
minor=${kubernetes#v1.}
set_version="-X k8s.io/component-base/version.gitVersion=$kubernetes -X k8s.io/component-base/version.gitMajor=1"
from_modules kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver \
  "$set_version -X k8s.io/component-base/version.gitMinor=${minor%%.*}"
from_modules etcd ./etcd ""
with_apt kubectl kubectl
with_apt kubectl kubernetes-client
with_apt prometheus prometheus
with_apt promtool prometheus
missing=
for tool in helm kubeconform kube-apiserver etcd kubectl prometheus promtool; do have "$tool" || missing="$missing $tool"; done
[ -z "$missing" ] || echo "not installed:$missing"
