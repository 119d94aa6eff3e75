package cli

import (
	"errors"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"
)

// treeXattrs reads a path's extended attributes as PAX records; none where the file system has none. security.selinux
// is the host's own labelling and stays.
func treeXattrs(path string) (map[string]string, error) {
	list := make([]byte, 4<<10)
	n, err := unix.Llistxattr(path, list)
	if errors.Is(err, unix.ERANGE) {
		list = make([]byte, 64<<10) // XATTR_LIST_MAX
		n, err = unix.Llistxattr(path, list)
	}
	if errors.Is(err, unix.ENOTSUP) || err == nil && n == 0 {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list the attributes of %s: %w", path, err)
	}
	records := map[string]string{}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00") {
		if name == "security.selinux" || strings.Contains(name, "=") { // a PAX record's key cannot hold "="
			continue
		}
		value := make([]byte, 64<<10) // XATTR_SIZE_MAX
		n, err := unix.Lgetxattr(path, name, value)
		if errors.Is(err, unix.ENODATA) {
			continue // gone, or a trusted attribute that this user may not read
		}
		if err != nil {
			return nil, fmt.Errorf("read the attribute %s of %s: %w", name, path, err)
		}
		records["SCHILY.xattr."+name] = string(value[:n])
	}
	return records, nil
}
