package agent

import (
	"bufio"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

const (
	maxID      = 1<<31 - 1 // the largest uid and gid, so that no width of integer turns one into another
	maxAccount = 8 << 20   // bytes read of passwd and of group
	maxLine    = 64 << 10  // bytes of one line; longer ones are passed over
	maxGroups  = 1024      // supplementary groups of one user
)

// The account files; variables because tests have their own.
var passwdFile, groupFile = "/etc/passwd", "/etc/group"

// account is one line of passwd.
type account struct {
	name     string
	uid, gid uint32
	home     string
}

// lookupUser turns name, uid, name:group or uid:gid (each side either way) into numbers, by the guest's own passwd and
// group. Digits alone are always a number, whatever passwd calls a line. A number need not be in passwd: then its group
// is 0 and its home /. A user that passwd knows and that names no group gets the supplementary groups of group. Empty
// is root, and root needs no passwd.
func lookupUser(spec string) (guest.UserHead, error) {
	if spec == "" {
		spec = "0"
	}
	user, group, withGroup := strings.Cut(spec, ":")
	byName := !isNumber(user)
	var uid uint32
	if byName {
		if !isName(user) {
			return guest.UserHead{}, shard.Invalidf("user %s is not valid: give a name, a number from 0 to %d, or either with :group", shard.Quote(spec), maxID)
		}
	} else {
		var ok bool
		if uid, ok = parseID(user); !ok {
			return guest.UserHead{}, shard.Invalidf("user %s is not valid: a number is from 0 to %d", shard.Quote(spec), maxID)
		}
	}

	var found *account
	eachLine(passwdFile, func(fields []string) bool {
		if a, ok := parseAccount(fields); ok && (byName && a.name == user || !byName && a.uid == uid) {
			found = &a
		}
		return found == nil
	})
	head := guest.UserHead{UID: uid, Home: "/"}
	switch {
	case found != nil:
		head.UID, head.GID, head.Home = found.uid, found.gid, found.home
	case byName && user != "root":
		return guest.UserHead{}, shard.Invalidf("user %s does not exist in the sandbox", shard.Quote(user))
	}

	if withGroup {
		gid, err := lookupGroup(group)
		head.GID = gid
		return head, err
	}
	if found != nil {
		head.Groups = groupsOf(found)
	}
	return head, nil
}

func lookupGroup(group string) (uint32, error) {
	if isNumber(group) {
		gid, ok := parseID(group)
		if !ok {
			return 0, shard.Invalidf("group %s is not valid: a number is from 0 to %d", shard.Quote(group), maxID)
		}
		return gid, nil
	}
	if !isName(group) {
		return 0, shard.Invalidf("group %s is not valid: give a name or a number from 0 to %d", shard.Quote(group), maxID)
	}
	gid, known := uint32(0), false
	eachLine(groupFile, func(fields []string) bool {
		if len(fields) >= 3 && fields[0] == group {
			gid, known = parseID(fields[2])
		}
		return !known
	})
	if !known && group != "root" {
		return 0, shard.Invalidf("group %s does not exist in the sandbox", shard.Quote(group))
	}
	return gid, nil
}

// groupsOf lists the groups that name a as a member, its own group left out.
func groupsOf(a *account) []uint32 {
	var groups []uint32
	seen := map[uint32]bool{a.gid: true}
	eachLine(groupFile, func(fields []string) bool {
		if len(fields) < 4 {
			return true
		}
		gid, ok := parseID(fields[2])
		if !ok || seen[gid] {
			return true
		}
		for member := range strings.SplitSeq(fields[3], ",") {
			if member == a.name {
				seen[gid] = true
				groups = append(groups, gid)
				break
			}
		}
		return len(groups) < maxGroups
	})
	return groups
}

func parseAccount(fields []string) (account, bool) {
	if len(fields) < 6 || fields[0] == "" {
		return account{}, false
	}
	uid, ok := parseID(fields[2])
	gid, ok2 := parseID(fields[3])
	a := account{name: fields[0], uid: uid, gid: gid, home: fields[5]}
	if !strings.HasPrefix(a.home, "/") {
		a.home = "/"
	}
	return a, ok && ok2
}

// isNumber says whether s can only be meant as a number: digits alone.
func isNumber(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// isName says whether s can be the name of a user or group. What begins like a number is not, so that a passwd line
// named 0x1 or -1 never turns what was meant as a number into somebody.
func isName(s string) bool {
	if s == "" || len(s) > 256 || strings.IndexByte("0123456789-+", s[0]) >= 0 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; c <= ' ' || c == 0x7f || c == ':' || c == ',' || c == '/' {
			return false
		}
	}
	return true
}

func parseID(s string) (uint32, bool) {
	if !isNumber(s) {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n <= maxID
}

// eachLine calls f with the fields of each line until f says false. A file that is missing, or is not a regular file,
// has no lines; the guest owns it, so size and line are bounded and opening never blocks.
func eachLine(path string, f func(fields []string) bool) {
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if err != nil {
		return
	}
	defer file.Close()
	if info, err := file.Stat(); err != nil || !info.Mode().IsRegular() {
		return
	}
	r := bufio.NewReader(io.LimitReader(file, maxAccount))
	var line []byte
	for {
		part, more, err := r.ReadLine()
		if err != nil {
			return
		}
		if len(line) <= maxLine {
			line = append(line, part...)
		}
		if more {
			continue
		}
		if len(line) <= maxLine && !f(strings.Split(string(line), ":")) {
			return
		}
		line = line[:0]
	}
}
