//go:build !linux

package hostfs

import "os"

// Attributes of the user namespace are Linux'; other systems keep none.
func xattrs(*os.File) map[string]string { return nil }

func setXattrs(*os.File, map[string]string) {}
