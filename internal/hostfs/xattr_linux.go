package hostfs

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// xattrs reads a file's attributes of the user namespace; a file system that has none gives none.
func xattrs(f *os.File) map[string]string {
	list := make([]byte, 64<<10) // XATTR_LIST_MAX
	n, err := unix.Flistxattr(int(f.Fd()), list)
	if err != nil || n == 0 {
		return nil
	}
	out := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00") {
		if !strings.HasPrefix(name, "user.") || strings.Contains(name, "=") {
			continue // a PAX record's key cannot hold "="
		}
		value := make([]byte, 64<<10) // XATTR_SIZE_MAX
		if n, err := unix.Fgetxattr(int(f.Fd()), name, value); err == nil {
			out[name] = string(value[:n])
		}
	}
	return out
}

// setXattrs sets what the file system takes.
func setXattrs(f *os.File, attrs map[string]string) {
	for name, value := range attrs {
		_ = unix.Fsetxattr(int(f.Fd()), name, []byte(value), 0)
	}
}
