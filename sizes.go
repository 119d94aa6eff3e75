package shard

import (
	"math"
	"regexp"
	"strconv"
	"sync"
)

var sizePattern = sync.OnceValue(func() *regexp.Regexp {
	return regexp.MustCompile(`^([0-9]{1,15})(KiB|MiB|GiB|KB|MB|GB)$`)
})

var units = map[string]int64{"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 1e3, "MB": 1e6, "GB": 1e9}

// The highest bounds of a sandbox, in MiB, whatever its host and provider have.
const (
	MaxMemoryMiB = 16 << 20
	MaxDiskMiB   = 16<<20 - 128
)

// ParseSize reads a size such as 512MiB or 2GB and returns it in MiB, rounded up; "0" is 0.
func ParseSize(s string) (mib int64, err error) {
	if s == "0" {
		return 0, nil
	}
	m := sizePattern().FindStringSubmatch(s)
	if m == nil {
		return 0, Invalidf("%s is not a size: write a whole number and KiB, MiB, GiB, KB, MB or GB, such as 512MiB", Quote(s))
	}
	n, _ := strconv.ParseInt(m[1], 10, 64) // at most 15 digits: always fits
	unit := units[m[2]]
	if n > (math.MaxInt64-(1<<20))/unit {
		return 0, Invalidf("%s is too large", Quote(s))
	}
	return (n*unit + 1<<20 - 1) >> 20, nil
}
