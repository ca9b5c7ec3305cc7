//go:build tools

// Package tools names the programs of Kubernetes that the tests use. go.mod and go.sum pin them with all they need.
package tools

import _ "k8s.io/kubernetes/cmd/kube-apiserver"
