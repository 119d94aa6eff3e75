package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

var fileStates = map[string]state{
	"deleted": func(string) func() error {
		f := must(os.Create("/s/deleted"))
		f.WriteString("hello")
		do(os.Remove("/s/deleted"))
		return addAndRead(f, "hello")
	},
	"deletedsize": func(arg string) func() error { // sparse deleted file of that many MiB
		var n int64
		fmt.Sscan(arg, &n)
		f := must(os.Create("/s/deletedsize"))
		do(f.Truncate(n << 20))
		do(os.Remove("/s/deletedsize"))
		return func() error {
			st := must(f.Stat())
			if st.Size() != n<<20 {
				return fmt.Errorf("size %d", st.Size())
			}
			return nil
		}
	},
	"deletedfull": func(arg string) func() error { // deleted file of so many MiB with data
		var n int
		fmt.Sscan(arg, &n)
		f := must(os.Create("/s/deletedfull"))
		mb := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
		for range n {
			must(f.Write(mb))
		}
		do(os.Remove("/s/deletedfull"))
		return func() error {
			b := make([]byte, 1<<20)
			for i := range n {
				if _, err := f.ReadAt(b, int64(i)<<20); err != nil || !bytes.Equal(b, mb) {
					return fmt.Errorf("MiB %d differs, %v", i, err)
				}
			}
			return nil
		}
	},
	"replaced": func(string) func() error {
		f := must(os.Create("/s/replaced"))
		f.WriteString("old")
		do(os.Remove("/s/replaced"))
		do(os.WriteFile("/s/replaced", []byte("new"), 0o644))
		return func() error {
			if b, _ := os.ReadFile("/s/replaced"); string(b) != "new" {
				return fmt.Errorf("the new file holds %q", b)
			}
			return addAndRead(f, "old")()
		}
	},
	"renamedover": func(string) func() error {
		f := must(os.Create("/s/over"))
		f.WriteString("old")
		do(os.WriteFile("/s/over.new", []byte("new"), 0o644))
		do(os.Rename("/s/over.new", "/s/over"))
		return func() error {
			if b, _ := os.ReadFile("/s/over"); string(b) != "new" {
				return fmt.Errorf("the new file holds %q", b)
			}
			return addAndRead(f, "old")()
		}
	},
	"renamed": func(string) func() error {
		f := must(os.Create("/s/from"))
		f.WriteString("x")
		do(os.Rename("/s/from", "/s/to"))
		return func() error {
			if err := addAndRead(f, "x")(); err != nil {
				return err
			}
			if b, _ := os.ReadFile("/s/to"); string(b) != "x+more" {
				return fmt.Errorf("by its name it holds %q", b)
			}
			return nil
		}
	},
	"longreplaced": func(string) func() error {
		name := "/s/" + strings.Repeat("n", 255)
		f := must(os.Create(name))
		f.WriteString("old")
		do(os.Remove(name))
		do(os.WriteFile(name, []byte("new"), 0o644))
		return addAndRead(f, "old")
	},
	"deleteddir": func(string) func() error {
		do(os.MkdirAll("/s/dd/sub", 0o755))
		f := must(os.Create("/s/dd/sub/f"))
		f.WriteString("x")
		do(os.RemoveAll("/s/dd"))
		return addAndRead(f, "x")
	},
	"cwdgone": func(string) func() error {
		do(os.MkdirAll("/s/cwd/x", 0o755))
		do(os.Chdir("/s/cwd/x"))
		do(os.RemoveAll("/s/cwd"))
		return func() error { _, err := os.Stat("."); return err }
	},
	"deletedroparent": func(string) func() error {
		do(os.MkdirAll("/s/ro", 0o755))
		f := must(os.Create("/s/ro/f"))
		f.WriteString("x")
		do(os.Remove("/s/ro/f"))
		do(os.Chmod("/s/ro", 0))
		return addAndRead(f, "x")
	},
	"mode0": func(string) func() error {
		f := must(os.Create("/s/mode0"))
		f.WriteString("x")
		do(os.Chmod("/s/mode0", 0))
		do(os.Chown("/s/mode0", 1234, 1234))
		return addAndRead(f, "x")
	},
	"mode0user": func(string) func() error {
		f := must(os.Create("/s/mode0user"))
		f.WriteString("x")
		do(os.Chmod("/", 0o777))
		do(syscall.Setuid(1000))
		return func() error {
			if _, err := f.WriteAt([]byte("+more"), 1); err != nil {
				return err
			}
			return wrote(f, "x+more")
		}
	},
	"hardlink": func(string) func() error { // what is written behind the pause must be seen by the other name
		f := must(os.Create("/s/link1"))
		f.WriteString("x")
		do(os.Link("/s/link1", "/s/link2"))
		do(os.Remove("/s/link1"))
		return func() error {
			if err := addAndRead(f, "x")(); err != nil {
				return err
			}
			if b, _ := os.ReadFile("/s/link2"); string(b) != "x+more" {
				return fmt.Errorf("by its other name it holds %q", b)
			}
			return nil
		}
	},
	"linkmoved": func(string) func() error { // as git makes its objects; nobody has it open
		do(os.WriteFile("/s/lm.tmp", []byte("x"), 0o644))
		do(os.Link("/s/lm.tmp", "/s/lm"))
		do(os.Remove("/s/lm.tmp"))
		must(os.ReadFile("/s/lm"))
		return func() error {
			f, err := os.OpenFile("/s/lm", os.O_RDWR, 0)
			if err != nil {
				return err
			}
			return addAndRead(f, "x")()
		}
	},
	"hardlinkother": func(string) func() error {
		do(os.WriteFile("/s/ho1", []byte("x"), 0o644))
		do(os.Link("/s/ho1", "/s/ho2"))
		g := must(os.OpenFile("/s/ho1", os.O_RDWR, 0))
		f := must(os.OpenFile("/s/ho2", os.O_RDWR, 0))
		do(os.Remove("/s/ho2"))
		return func() error {
			if err := addAndRead(f, "x")(); err != nil {
				return err
			}
			if err := wrote(g, "x+more"); err != nil {
				return err
			}
			if b, _ := os.ReadFile("/s/ho1"); string(b) != "x+more" {
				return fmt.Errorf("by its other name it holds %q", b)
			}
			return nil
		}
	},
	"hardlinkboth": func(string) func() error {
		f := must(os.Create("/s/hl1"))
		f.WriteString("x")
		do(os.Link("/s/hl1", "/s/hl2"))
		g := must(os.OpenFile("/s/hl2", os.O_RDWR, 0))
		return func() error {
			if err := addAndRead(f, "x")(); err != nil {
				return err
			}
			return wrote(g, "x+more")
		}
	},
	"deletedmode0": func(string) func() error {
		f := must(os.OpenFile("/s/dm0", os.O_CREATE|os.O_RDWR, 0))
		f.WriteString("x")
		do(os.Remove("/s/dm0"))
		return addAndRead(f, "x")
	},
	"deletedpath": func(string) func() error { // O_PATH of a deleted file
		do(os.WriteFile("/s/dpath", []byte("x"), 0o600))
		fd := must(unix.Open("/s/dpath", unix.O_PATH, 0))
		do(os.Remove("/s/dpath"))
		return func() error { var st unix.Stat_t; return unix.Fstat(fd, &st) }
	},
	"deletedsymlink": func(string) func() error {
		do(os.Symlink("x", "/s/dsym"))
		fd := must(unix.Open("/s/dsym", unix.O_PATH|unix.O_NOFOLLOW, 0))
		do(os.Remove("/s/dsym"))
		return func() error { var st unix.Stat_t; return unix.Fstat(fd, &st) }
	},
	"deletedfifo": func(string) func() error {
		do(unix.Mkfifo("/s/dfifo", 0o600))
		f := must(os.OpenFile("/s/dfifo", os.O_RDWR, 0))
		do(os.Remove("/s/dfifo"))
		return func() error { _, err := f.Write([]byte("x")); return err }
	},
	"fifo": func(string) func() error {
		do(unix.Mkfifo("/s/fifo", 0o600))
		f := must(os.OpenFile("/s/fifo", os.O_RDWR, 0))
		f.WriteString("in the pipe")
		return func() error {
			b := make([]byte, 100)
			n, err := f.Read(b)
			if string(b[:n]) != "in the pipe" {
				return fmt.Errorf("%q %v", b[:n], err)
			}
			return nil
		}
	},
	"fifoblocked": func(string) func() error {
		do(unix.Mkfifo("/s/fifob", 0o600))
		go os.OpenFile("/s/fifob", os.O_WRONLY, 0)
		time.Sleep(50 * time.Millisecond)
		return func() error {
			_, err := os.OpenFile("/s/fifob", os.O_RDONLY, 0)
			return err
		}
	},
	"deep": func(arg string) func() error { // a directory 1500 levels deep, and a file open there
		n := 1500
		fmt.Sscan(arg, &n)
		do(os.Chdir("/s"))
		for range n {
			do(os.Mkdir("deepdeepdeep", 0o755))
			do(os.Chdir("deepdeepdeep"))
		}
		f := must(os.Create("f"))
		f.WriteString("x")
		return addAndRead(f, "x")
	},
	"deepdeleted": func(string) func() error {
		do(os.Chdir("/s"))
		for range 200 {
			do(os.Mkdir("delldelldell", 0o755))
			do(os.Chdir("delldelldell"))
		}
		f := must(os.Create("f"))
		f.WriteString("x")
		do(os.Remove("f"))
		for range 200 {
			do(os.Chdir(".."))
			do(os.Remove("delldelldell"))
		}
		return addAndRead(f, "x")
	},
	"longpath": func(string) func() error {
		p := "/s"
		for range 15 {
			p += "/" + strings.Repeat("l", 255)
		}
		do(os.MkdirAll(p, 0o755))
		f := must(os.Create(p + "/f"))
		f.WriteString("x")
		return addAndRead(f, "x")
	},
	"names": func(string) func() error {
		f := must(os.Create("/s/\xff\xfe \n\x01*?\"'$(x)"))
		f.WriteString("x")
		g := must(os.Create("/s/ (deleted)"))
		keep = append(keep, g)
		return addAndRead(f, "x")
	},
	"direct": func(string) func() error {
		fd := must(unix.Open("/s/direct", unix.O_CREAT|unix.O_RDWR|unix.O_DIRECT, 0o644))
		m := must(unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON))
		must(unix.Pwrite(fd, m, 0))
		return func() error { _, err := unix.Pwrite(fd, m, 4096); return err }
	},
	"append": func(string) func() error {
		f := must(os.OpenFile("/s/append", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644))
		f.WriteString("a")
		return func() error {
			f.WriteString("b")
			b, err := os.ReadFile("/s/append")
			if string(b) != "ab" {
				return fmt.Errorf("%q %v", b, err)
			}
			return nil
		}
	},
	"locks": func(string) func() error {
		f := must(os.Create("/s/locks"))
		keep = append(keep, f)
		do(unix.Flock(int(f.Fd()), unix.LOCK_EX))
		do(unix.FcntlFlock(f.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Start: 0, Len: 10}))
		return func() error {
			g, err := os.OpenFile("/s/locks", os.O_RDWR, 0)
			if err != nil {
				return err
			}
			if err := unix.Flock(int(g.Fd()), unix.LOCK_EX|unix.LOCK_NB); err == nil {
				return errors.New("the lock is gone")
			}
			return nil
		}
	},
	"openmany": func(arg string) func() error {
		n := 5000
		fmt.Sscan(arg, &n)
		var lim unix.Rlimit
		unix.Getrlimit(unix.RLIMIT_NOFILE, &lim)
		lim.Cur = lim.Max
		unix.Setrlimit(unix.RLIMIT_NOFILE, &lim)
		do(os.MkdirAll("/s/many", 0o755))
		var fs []*os.File
		for i := range n {
			f := must(os.Create(fmt.Sprintf("/s/many/%d", i)))
			fs = append(fs, f)
		}
		return func() error {
			for _, f := range fs {
				if _, err := f.Write([]byte("x")); err != nil {
					return err
				}
			}
			return nil
		}
	},
	"writing": func(string) func() error { // a file written at full speed
		f := must(os.Create("/s/writing"))
		b := make([]byte, 1<<20)
		var n, failed int64
		go func() {
			for {
				if _, err := f.WriteAt(b, (n%64)<<20); err != nil {
					failed++
				}
				n++
			}
		}()
		time.Sleep(100 * time.Millisecond)
		return func() error {
			was := n
			time.Sleep(300 * time.Millisecond)
			if n == was || failed > 0 {
				return fmt.Errorf("writes %d then %d, %d failed", was, n, failed)
			}
			return nil
		}
	},
	"churn": func(string) func() error { // files made, renamed, linked, removed at full speed
		var n, failed int64
		for g := range 4 {
			go func() {
				d := fmt.Sprintf("/s/churn%d", g)
				os.MkdirAll(d, 0o755)
				for i := 0; ; i++ {
					p := filepath.Join(d, fmt.Sprint(i%10))
					f, err := os.Create(p)
					if err != nil {
						failed++
						continue
					}
					f.WriteString("x")
					os.Rename(p, p+"r")
					os.Remove(p + "r")
					f.WriteString("y")
					f.Close()
					n++
				}
			}()
		}
		time.Sleep(100 * time.Millisecond)
		return func() error {
			was := n
			time.Sleep(500 * time.Millisecond)
			if n == was || failed > 0 {
				return fmt.Errorf("%d then %d, %d failed", was, n, failed)
			}
			return nil
		}
	},
}

func wrote(f *os.File, want string) error {
	b := make([]byte, 10000)
	n, err := f.ReadAt(b, 0)
	if err != nil && err != io.EOF {
		return err
	}
	if string(b[:n]) != want {
		return fmt.Errorf("file holds %q, want %q", b[:n], want)
	}
	return nil
}

func addAndRead(f *os.File, had string) func() error {
	return func() error {
		if _, err := f.WriteAt([]byte("+more"), int64(len(had))); err != nil {
			return err
		}
		return wrote(f, had+"+more")
	}
}
