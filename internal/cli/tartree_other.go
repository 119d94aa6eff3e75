//go:build !linux

package cli

// treeXattrs: only Linux has attributes that mean something in an image.
func treeXattrs(string) (map[string]string, error) { return nil, nil }
