#!/bin/sh
# Installs the programs that some tests use, into .tools/bin where `make` finds them. Go installs helm and kubeconform.
# It builds kube-apiserver and etcd from the modules that tests/tools/go.sum pins: 3 to 10 minutes on two cores, once.
# For root, apt installs prometheus, promtool and kubectl. A failed build or installation is tried once more.
# Tests without their program are skipped. With BACKSTAY_REQUIRE_TOOLS=1, as in CI, this script fails if one is missing,
# or if a build failed. Then its last lines are the output of that build.
set -eu
cd "$(dirname "$0")/.."
mkdir -p .tools/bin
rm -f .tools/*.failed
export GOBIN="$PWD/.tools/bin" GOFLAGS=-buildvcs=false
have() { [ -x ".tools/bin/$1" ] || command -v "$1" >/dev/null 2>&1; }
twice() { # name command...
  name=$1
  shift
  for attempt in 1 2; do
    "$@" >".tools/$name.log" 2>&1 && { rm -f ".tools/$name.log" ".tools/$name.failed"; return 0; }
    echo "$name could not be installed (try $attempt of 2)"
    mv ".tools/$name.log" ".tools/$name.failed"
  done
}
with_go() { # name module@version
  have "$1" && return 0
  command -v go >/dev/null 2>&1 || return 0
  echo "installing $1 ($2)"
  twice "$1" go install "$2"
}
build() { # name package flags
  go build -C tests/tools -trimpath -ldflags "-s -w $3" -o "$GOBIN/$1" "$2" && touch ".tools/bin/$1"
}
from_modules() { # name package flags
  [ -x ".tools/bin/$1" ] && [ ".tools/bin/$1" -nt tests/tools/go.sum ] && return 0
  command -v go >/dev/null 2>&1 || return 0
  echo "building $1 ($2)"
  twice "$1" build "$@"
}
apt_install() { # package
  [ -e .tools/apt-updated ] || { apt-get update -qq && touch .tools/apt-updated; } || return 1
  # Without a runlevel of 1, the package would start a service. The tests start their own.
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1"
}
with_apt() { # name package...: the first package that exists
  have "$1" && return 0
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 0
  program=$1
  shift
  for package in "$@"; do
    echo "installing $program (package $package)"
    twice "$program" apt_install "$package"
    have "$program" && return 0
  done
}
with_go helm helm.sh/helm/v3/cmd/helm@v3.22.0
with_go kubeconform github.com/yannh/kubeconform/cmd/kubeconform@v0.8.0
kubernetes=$(sed -n 's#^.*k8s.io/kubernetes \(v[0-9.]*\).*#\1#p' tests/tools/go.mod)
minor=${kubernetes#v1.}
set_version="-X k8s.io/component-base/version.gitVersion=$kubernetes -X k8s.io/component-base/version.gitMajor=1"
from_modules kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver \
  "$set_version -X k8s.io/component-base/version.gitMinor=${minor%%.*}"
from_modules etcd ./etcd ""
with_apt kubectl kubectl kubernetes-client
with_apt prometheus prometheus
with_apt promtool prometheus
missing=
for tool in helm kubeconform kube-apiserver etcd kubectl prometheus promtool; do have "$tool" || missing="$missing $tool"; done
failed=
for log in .tools/*.failed; do [ ! -e "$log" ] || failed="$failed $log"; done
[ -z "$missing$failed" ] && exit 0
if [ -n "${BACKSTAY_REQUIRE_TOOLS:-}" ]; then
  for log in $failed; do
    echo "---- $log:"
    tail -n 20 "$log"
  done
fi
[ -z "$missing" ] || echo "not installed:$missing"
[ -z "${BACKSTAY_REQUIRE_TOOLS:-}" ]
