//go:build !linux

// Package oci is the provider of everything that an OCI runtime isolates. Such runtimes exist on Linux only.
package oci
