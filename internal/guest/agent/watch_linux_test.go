package agent

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// observer is a watcher under test and what it has reported.
type observer struct {
	t     testing.TB
	w     *watcher
	ended chan error
}

func observe(t testing.TB, dir string, recursive bool) *observer {
	t.Helper()
	w, err := newWatcher(dir, recursive)
	if err != nil {
		t.Fatal(err)
	}
	o := &observer{t: t, w: w, ended: make(chan error, 1)}
	t.Cleanup(func() { w.in.Close() })
	return o
}

func (o *observer) run() *observer {
	done := make(chan struct{})
	go func() { o.ended <- o.w.run(); close(done) }()
	o.t.Cleanup(func() { o.w.in.Close(); <-done })
	return o
}

// taken decodes what the outbox holds.
func (o *observer) taken() []shard.FileEvent {
	o.t.Helper()
	var events []shard.FileEvent
	for line := range bytes.Lines(o.w.out.take()) {
		var e shard.FileEvent
		if err := json.Unmarshal(line, &e); err != nil {
			o.t.Fatalf("%q: %v", line, err)
		}
		if e.PathBytes != nil {
			e.Path = string(e.PathBytes)
		}
		if e.FromBytes != nil {
			e.From = string(e.FromBytes)
		}
		events = append(events, e)
	}
	return events
}

// until reads events until one is about a path.
func (o *observer) until(path string) []shard.FileEvent {
	o.t.Helper()
	var events []shard.FileEvent
	timeout := time.After(time.Minute)
	for {
		events = append(events, o.taken()...)
		for _, e := range events {
			if e.Path == path {
				return events
			}
		}
		select {
		case <-o.w.out.ready:
		case <-timeout:
			o.t.Fatalf("no event for %s; there were:\n%s", path, story(events))
		}
	}
}

// after makes a file to mark the end of what a test did, and returns the events before it.
func (o *observer) after(dir string) []shard.FileEvent {
	o.t.Helper()
	mark := filepath.Join(dir, "mark-"+strconv.Itoa(int(rand.Int32())))
	if err := os.WriteFile(mark, nil, 0o644); err != nil {
		o.t.Fatal(err)
	}
	events := o.until(mark)
	if err := os.Remove(mark); err != nil {
		o.t.Fatal(err)
	}
	return slices.DeleteFunc(events, func(e shard.FileEvent) bool { return strings.Contains(e.Path, "/mark-") })
}

func story(events []shard.FileEvent) string {
	var b strings.Builder
	for _, e := range events {
		fmt.Fprintf(&b, "%s %s", e.Type, e.Path)
		if e.From != "" {
			fmt.Fprintf(&b, " from %s", e.From)
		}
		if e.IsDir {
			b.WriteString(" dir")
		}
		b.WriteByte('\n')
	}
	return b.String()
}

// told checks events against lines like "created a dir", whose paths are relative to dir.
func told(t *testing.T, dir string, events []shard.FileEvent, want ...string) {
	t.Helper()
	got := strings.Split(strings.TrimSpace(strings.ReplaceAll(story(events), dir+"/", "")), "\n")
	if !slices.Equal(got, want) {
		t.Errorf("got\n  %s\nwant\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

func do(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func TestWatchTellsEachChange(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "root")
	outside := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	do(t, os.MkdirAll(at("old/deep"), 0o755), os.WriteFile(at("old/f"), nil, 0o644))
	o := observe(t, dir+"//", true).run()

	do(t, os.WriteFile(at("a"), nil, 0o644))
	told(t, dir, o.after(dir), "created a")
	do(t, os.WriteFile(at("old/f"), []byte("x"), 0o644), os.WriteFile(at("old/deep/g"), nil, 0o644))
	told(t, dir, o.after(dir), "modified old/f", "created old/deep/g")
	do(t, os.Chmod(at("old/f"), 0o600))
	told(t, dir, o.after(dir), "modified old/f")
	do(t, os.Rename(at("a"), at("old/b")))
	told(t, dir, o.after(dir), "moved old/b from "+at("a")[len(dir)+1:])
	do(t, os.Rename(at("old/b"), filepath.Join(outside, "b")))
	told(t, dir, o.after(dir), "deleted old/b")
	do(t, os.Rename(filepath.Join(outside, "b"), at("c")))
	told(t, dir, o.after(dir), "created c")
	do(t, os.Remove(at("c")))
	told(t, dir, o.after(dir), "deleted c")

	// Directories: what is below follows a move, and what comes along from outside is found.
	do(t, os.Rename(at("old"), at("new")))
	told(t, dir, o.after(dir), "moved new from old dir")
	do(t, os.WriteFile(at("new/deep/h"), nil, 0o644))
	told(t, dir, o.after(dir), "created new/deep/h")
	do(t, os.Rename(at("new"), filepath.Join(outside, "new")), os.WriteFile(filepath.Join(outside, "new/deep/i"), nil, 0o644))
	told(t, dir, o.after(dir), "deleted new dir")
	do(t, os.Rename(filepath.Join(outside, "new"), at("back")))
	got := strings.Split(strings.TrimSpace(strings.ReplaceAll(story(o.after(dir)), dir+"/", "")), "\n")
	slices.Sort(got)
	if want := strings.Fields("back back/deep back/deep/g back/deep/h back/deep/i back/f"); len(got) != len(want) {
		t.Errorf("a directory moved in: %q", got)
	} else {
		for i, line := range got {
			if strings.TrimSuffix(line, " dir") != "created "+want[i] {
				t.Errorf("a directory moved in: %q, want created %s", line, want[i])
			}
		}
	}
	do(t, os.Mkdir(at("x"), 0o755), os.WriteFile(at("x/in"), nil, 0o644), os.WriteFile(at("y"), nil, 0o644))
	o.after(dir)
	if err := unix.Renameat2(unix.AT_FDCWD, at("x"), unix.AT_FDCWD, at("y"), unix.RENAME_EXCHANGE); err == nil {
		picture := map[string]bool{at("x"): true, at("x/in"): true, at("y"): true}
		apply(t, picture, o.after(dir))
		if len(picture) != 3 || !picture[at("x")] || !picture[at("y/in")] {
			t.Errorf("after an exchange of names: %v", picture)
		}
	} else if err != unix.EINVAL && err != unix.ENOSYS { // not on every file system
		t.Error(err)
	}
	do(t, os.RemoveAll(at("back/deep")))
	events := o.after(dir)
	if last := events[len(events)-1]; last.Type != shard.FileDeleted || last.Path != at("back/deep") || !last.IsDir || len(events) != 4 {
		t.Errorf("a tree removed:\n%s", story(events))
	}

	// Names, and what is no directory.
	odd := at("back/odd\xff%\n\"")
	do(t, os.Mkdir(odd, 0o755), os.WriteFile(odd+"/x\xfe", nil, 0o644))
	told(t, dir, o.after(dir), "created back/odd\xff%", "\" dir", "created back/odd\xff%", "\"/x\xfe")
	do(t, os.Symlink(outside, at("link")), os.WriteFile(filepath.Join(outside, "not-ours"), nil, 0o644), unix.Mkfifo(at("fifo"), 0o600))
	told(t, dir, o.after(dir), "created link", "created fifo")
}

func TestWatchNotRecursive(t *testing.T) {
	dir := t.TempDir()
	do(t, os.Mkdir(filepath.Join(dir, "sub"), 0o755))
	o := observe(t, dir, false).run()
	do(t, os.WriteFile(filepath.Join(dir, "sub/f"), nil, 0o644), os.Mkdir(filepath.Join(dir, "new"), 0o755),
		os.WriteFile(filepath.Join(dir, "new/f"), nil, 0o644))
	told(t, dir, o.after(dir), "created new dir")
}

func TestWatchEndsWithItsDirectory(t *testing.T) {
	for name, end := range map[string]func(string) error{
		"removed": os.RemoveAll,
		"moved":   func(dir string) error { return os.Rename(dir, dir+"-elsewhere") },
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "root")
			do(t, os.MkdirAll(filepath.Join(dir, "sub"), 0o755))
			o := observe(t, dir, true).run()
			do(t, end(dir))
			if err := <-o.ended; err != nil {
				t.Fatal(err)
			}
			o.ended <- nil
			events := o.taken()
			if len(events) == 0 {
				t.Fatal("the end was not told")
			}
			if last := events[len(events)-1]; last.Type != shard.FileDeleted || last.Path != dir || !last.IsDir {
				t.Errorf("the end was told so:\n%s", story(events))
			}
		})
	}
}

func TestWatchRefusals(t *testing.T) {
	dir := t.TempDir()
	do(t, os.WriteFile(filepath.Join(dir, "f"), nil, 0o644))
	for path, code := range map[string]shard.Code{
		"":                           shard.CodeInvalidRequest,
		"relative":                   shard.CodeInvalidRequest,
		filepath.Join(dir, "f"):      shard.CodeInvalidRequest,
		filepath.Join(dir, "f", "x"): shard.CodeInvalidRequest,
		filepath.Join(dir, "none"):   shard.CodeNotFound,
	} {
		if _, err := newWatcher(path, true); shard.CodeOf(err) != code {
			t.Errorf("watch %q: %v, want %s", path, err, code)
		}
	}
	// A link as the root is followed, and its own path is what is reported.
	link := filepath.Join(t.TempDir(), "link")
	do(t, os.Symlink(dir, link))
	o := observe(t, link, true).run()
	do(t, os.WriteFile(filepath.Join(dir, "g"), nil, 0o644))
	told(t, link, o.until(filepath.Join(link, "g")), "created g")
}

func TestWatchTooManyDirectories(t *testing.T) {
	dir := t.TempDir()
	for i := range maxWatchedDirs - 1 {
		do(t, os.Mkdir(filepath.Join(dir, strconv.Itoa(i)), 0o755))
	}
	o := observe(t, dir, true).run() // exactly the most
	do(t, os.Mkdir(filepath.Join(dir, "one-more"), 0o755))
	if err := <-o.ended; shard.CodeOf(err) != shard.CodeInvalidRequest || !strings.Contains(err.Error(), strconv.Itoa(maxWatchedDirs)) {
		t.Errorf("one more while it is watched: %v", err)
	}
	o.ended <- nil
	if _, err := newWatcher(dir, true); shard.CodeOf(err) != shard.CodeInvalidRequest {
		t.Errorf("one more before it is watched: %v", err)
	}
}

// TestWatchOverflowOfTheHost: events that nobody takes are dropped, and that is said once, at the place of the gap.
func TestWatchOverflowOfTheHost(t *testing.T) {
	dir := t.TempDir()
	o := observe(t, dir, true).run()
	long := strings.Repeat("n", 200)
	for i := 0; ; i++ {
		do(t, os.WriteFile(filepath.Join(dir, long+strconv.Itoa(i)), nil, 0o644))
		o.w.out.mu.Lock()
		lost := o.w.out.lost
		o.w.out.mu.Unlock()
		if lost {
			break
		}
	}
	events := o.taken()
	last := events[len(events)-1]
	if last.Type != shard.FileOverflow || last.Path != dir {
		t.Errorf("the last of %d events: %+v", len(events), last)
	}
	for _, e := range events[:len(events)-1] {
		if e.Type != shard.FileCreated {
			t.Fatalf("an event before the gap: %+v", e)
		}
	}
	o.after(dir) // goes on
}

// TestWatchOverflowOfTheKernel: when the kernel dropped events, directories that were made meanwhile are watched still.
func TestWatchOverflowOfTheKernel(t *testing.T) {
	raw, err := os.ReadFile("/proc/sys/fs/inotify/max_queued_events")
	if err != nil {
		t.Skip(err)
	}
	limit, _ := strconv.Atoi(strings.TrimSpace(string(raw)))
	if limit == 0 || limit > 100_000 {
		t.Skipf("the kernel queues %d events: too many to overflow here", limit)
	}
	dir := t.TempDir()
	do(t, os.Mkdir(filepath.Join(dir, "gone"), 0o755))
	o := observe(t, dir, true)
	a, b := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	do(t, os.WriteFile(a, nil, 0o644))
	for i := 0; i <= limit; i += 2 {
		do(t, os.Rename(a, b), os.Rename(b, a))
	}
	do(t, os.Remove(filepath.Join(dir, "gone")), os.MkdirAll(filepath.Join(dir, "made/deep"), 0o755))
	o.run()
	timeout := time.After(time.Minute)
	for overflow := false; !overflow; {
		select {
		case <-o.w.out.ready:
		case <-timeout:
			t.Fatal("no overflow was told")
		}
		for _, e := range o.taken() {
			overflow = overflow || e.Type == shard.FileOverflow
		}
	}
	do(t, os.WriteFile(filepath.Join(dir, "made/deep/f"), nil, 0o644))
	o.until(filepath.Join(dir, "made/deep/f"))
}

// TestWatchReplay: whoever applies the events to a picture of the tree has the tree, whatever several writers do at once.
func TestWatchReplay(t *testing.T) {
	for seed := range uint64(5) {
		t.Run(strconv.Itoa(int(seed)), func(t *testing.T) {
			t.Parallel()
			base := t.TempDir()
			dir, outside := filepath.Join(base, "root"), filepath.Join(base, "outside")
			do(t, os.Mkdir(dir, 0o755), os.Mkdir(outside, 0o755))
			o := observe(t, dir, true).run()
			picture := map[string]bool{}
			var writers sync.WaitGroup
			for i := range min(seed+1, 3) { // the first two are less of a crowd
				writers.Go(func() { disturb(rand.New(rand.NewPCG(seed, i)), dir, outside) })
			}
			finished := make(chan struct{})
			go func() { writers.Wait(); close(finished) }()
			var all []shard.FileEvent
			for open := true; open; {
				select {
				case <-o.w.out.ready:
					all = append(all, o.taken()...)
				case <-finished:
					open = false
				}
			}
			all = append(all, o.after(dir)...)
			apply(t, picture, all)
			want := map[string]bool{}
			do(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if path != dir {
					want[path] = true
				}
				return err
			}))
			for path := range want {
				if !picture[path] {
					t.Errorf("%s is there and was not told", path)
				}
			}
			for path := range picture {
				if !want[path] {
					t.Errorf("%s was told and is not there", path)
				}
			}
			t.Logf("%d events, %d entries", len(all), len(want))
			if t.Failed() {
				t.Log(strings.ReplaceAll(story(all), dir, ""))
			}
		})
	}
}

// disturb makes, moves and removes files and directories, some of them across the border of the tree.
func disturb(r *rand.Rand, dir, outside string) {
	some := func() string {
		path := dir
		if r.IntN(8) == 0 {
			path = outside
		}
		for range 1 + r.IntN(4) {
			path = filepath.Join(path, string(rune('a'+r.IntN(4))))
		}
		return path
	}
	for range 1500 { // most of what is tried fails, which is as good
		switch r.IntN(7) {
		case 0:
			_ = os.WriteFile(some(), []byte("x"), 0o644)
		case 1:
			_ = os.Mkdir(some(), 0o755)
		case 2:
			_ = os.MkdirAll(some(), 0o755)
		case 3, 4:
			_ = os.Rename(some(), some())
		case 5:
			if r.IntN(4) == 0 {
				_ = os.RemoveAll(some())
			} else {
				_ = os.Remove(some())
			}
		case 6:
			_ = unix.Renameat2(unix.AT_FDCWD, some(), unix.AT_FDCWD, some(), unix.RENAME_EXCHANGE)
		}
	}
}

// apply keeps a picture of a tree by events, as a client would.
func apply(t *testing.T, picture map[string]bool, events []shard.FileEvent) {
	below := func(top string, f func(path string)) {
		for path := range picture {
			if path == top || strings.HasPrefix(path, top+"/") {
				f(path)
			}
		}
	}
	for _, e := range events {
		switch e.Type {
		case shard.FileOverflow:
			t.Fatal("an overflow, though every event was taken")
		case shard.FileCreated:
			picture[e.Path] = true
		case shard.FileDeleted:
			below(e.Path, func(path string) { delete(picture, path) })
		case shard.FileMoved:
			var moved []string
			below(e.From, func(path string) { moved = append(moved, path[len(e.From):]); delete(picture, path) })
			below(e.Path, func(path string) { delete(picture, path) })
			picture[e.Path] = true
			for _, rest := range moved {
				picture[e.Path+rest] = true
			}
		}
	}
}
