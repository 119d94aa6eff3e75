package hostfs

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// xattrs reads a file's attributes of the user namespace; a file system that has none gives none.
func xattrs(f *os.File) map[string]string {
	fd := int(f.Fd())
	n, err := unix.Flistxattr(fd, nil)
	if err != nil || n == 0 {
		return nil
	}
	list := make([]byte, n)
	if n, err = unix.Flistxattr(fd, list); err != nil {
		return nil
	}
	out := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00") {
		if !strings.HasPrefix(name, "user.") || strings.Contains(name, "=") {
			continue // a PAX record's key cannot hold "="
		}
		n, err := unix.Fgetxattr(fd, name, nil)
		if err != nil {
			continue
		}
		value := make([]byte, n)
		if n, err = unix.Fgetxattr(fd, name, value); err == nil {
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
