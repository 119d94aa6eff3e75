package stream

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// text is n bytes of a stream in which every position can be told.
func text(from int64, n int) []byte {
	out := make([]byte, 0, n+32)
	line := []byte("000000000000000\n")
	for at := from - from%16; len(out) < n+16; at += 16 {
		for i, rest := 14, at; i > 2; i, rest = i-1, rest/10 {
			line[i] = '0' + byte(rest%10)
		}
		out = append(out, line...)
	}
	return out[from%16:][:n]
}

func begin(t testing.TB, l *Log) (*LogWriter, int64) {
	t.Helper()
	w, base, err := l.Begin()
	if err != nil {
		t.Fatal(err)
	}
	return w, base
}

func snap(t testing.TB, l *Log) []byte {
	t.Helper()
	r, err := l.Snapshot()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	all, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// TestLogKeepsTheNewest: the log is bounded, what it holds is the end of what was written, and the next daemon goes on
// exactly there, wherever the last one died.
func TestLogKeepsTheNewest(t *testing.T) {
	dir := t.TempDir()
	l := NewLog(dir, 0)
	w, _ := begin(t, l)
	end := int64(0)
	write := func(n int) {
		for n > 0 {
			k := min(n, 1<<20)
			if err := w.Append(text(end, k)); err != nil {
				t.Fatal(err)
			}
			end += int64(k)
			n -= k
		}
	}
	for i, n := range []int{0, 5, 1 << 20, 20 << 20, 1, 16 << 20, 33 << 20} {
		write(n)
		switch i % 3 { // as a crash, or an end, of the daemon
		case 0:
			l = NewLog(dir, 0)
		case 1:
			l.Close()
			l = NewLog(dir, 0)
		}
		got := snap(t, l)
		if len(got) > 2*MaxLog || end <= MaxLog && int64(len(got)) < min(end, MaxLog-logHeadAt) || !bytes.Equal(got, text(end-int64(len(got)), len(got))) {
			t.Fatalf("step %d: %d bytes at %d", i, len(got), end)
		}
		var err error
		var had int64
		if w, had, err = l.Resume(); err != nil || had != end {
			t.Fatalf("step %d: goes on at %d, %v, want %d", i, had, err, end)
		}
	}
	for _, name := range []string{logFile, oldFile} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Size() > MaxLog {
			t.Errorf("%s: %v, %v", name, info.Size(), err)
		}
	}
}

// TestLogRotationKilled: a daemon that dies between any two steps of a rotation leaves a log that the next one reads.
func TestLogRotationKilled(t *testing.T) {
	full := MaxLog - logHeadAt
	for name, spoil := range map[string]func(path func(string) string) error{
		"before the first rename": func(path func(string) string) error {
			return os.WriteFile(path(nextFile), fmt.Appendf(nil, logHead, full), 0o600)
		},
		"the next file not whole": func(path func(string) string) error { return os.WriteFile(path(nextFile), []byte("shard l"), 0o600) },
		"between the renames": func(path func(string) string) error {
			if err := os.WriteFile(path(nextFile), fmt.Appendf(nil, logHead, full), 0o600); err != nil {
				return err
			}
			return os.Rename(path(logFile), path(oldFile))
		},
		"the host lost the newest file": func(path func(string) string) error { return os.Rename(path(logFile), path(oldFile)) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			l := NewLog(dir, 0)
			w, _ := begin(t, l)
			if err := w.Append(text(0, full)); err != nil {
				t.Fatal(err)
			}
			if err := spoil(func(name string) string { return filepath.Join(dir, name) }); err != nil {
				t.Fatal(err)
			}
			l = NewLog(dir, 0)
			w, had, err := l.Resume()
			if err != nil || had != int64(full) {
				t.Fatalf("goes on at %d, %v", had, err)
			}
			if err := w.Append(text(had, 100)); err != nil {
				t.Fatal(err)
			}
			if got := snap(t, l); !bytes.Equal(got, text(0, full+100)) {
				t.Errorf("%d bytes", len(got))
			}
			if _, err := os.Stat(filepath.Join(dir, nextFile)); err == nil {
				t.Error("the next file is still there")
			}
		})
	}
}

func TestLogOverRuns(t *testing.T) {
	l := NewLog(t.TempDir(), 0)
	w, base := begin(t, l)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(w.Append([]byte("one\n")))
	old := w
	w, base2 := begin(t, l)
	if base != 0 || base2 != 4 {
		t.Errorf("bases %d and %d", base, base2)
	}
	must(old.Append([]byte("from a session that is gone")))
	must(w.Append([]byte("two\n")))
	failed, _ := begin(t, l)
	failed.Cancel()
	if got, base := l.Got(); got != 4 || base != 4 {
		t.Errorf("after a run that was none: %d bytes from %d", got, base)
	}
	if got := snap(t, l); string(got) != "one\ntwo\n" {
		t.Errorf("%q", got)
	}
}

// TestLogAcks: everything is acknowledged, but not while a holding reader is far behind.
func TestLogAcks(t *testing.T) {
	l := NewLog(t.TempDir(), 0)
	w, _ := begin(t, l)
	acked, sent := 0, 0
	put := func(n int) {
		if err := w.Append(text(int64(sent), n)); err != nil {
			t.Fatal(err)
		}
		sent += n
	}
	put(10)
	w.OnAck(func(n int) { acked += n })
	put(10)
	if acked != 20 {
		t.Errorf("acknowledged %d", acked)
	}
	idle, err := l.Follow(0, false)
	if err != nil {
		t.Fatal(err)
	}
	r, err := l.Follow(0, true)
	if err != nil {
		t.Fatal(err)
	}
	for sent < maxBehind+1<<20 {
		put(1 << 20)
	}
	if acked > maxBehind+20 || acked < maxBehind-1<<20 {
		t.Errorf("acknowledged %d while the reader is behind", acked)
	}
	var got []byte
	for {
		message, _, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if message == nil {
			break
		}
		got = append(got, message[1:]...)
	}
	if acked != sent || !bytes.Equal(got, text(0, sent)) {
		t.Errorf("acknowledged %d of %d, read %d", acked, sent, len(got))
	}
	put(100)
	r.Close()
	for range 40 {
		put(1 << 20) // nobody waits for the other
	}
	message, _, err := idle.Next()
	if err != nil || acked != sent || bytes.HasPrefix(message[1:], text(0, 16)) {
		t.Errorf("a follower that fell behind: %v, %.20q", err, message)
	}
	idle.Close()
}

// TestLogFull: a disk that is full costs output, and nothing else; positions stay right.
func TestLogFull(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "not", "there")
	l := NewLog(dir, 0)
	w, _ := begin(t, l)
	if err := os.WriteFile(filepath.Dir(dir), nil, 0o600); err != nil { // in the place of a directory
		t.Fatal(err)
	}
	acked := 0
	w.OnAck(func(n int) { acked += n })
	if err := w.Append([]byte("lost\n")); err == nil {
		t.Error("no error")
	}
	if err := os.Remove(filepath.Dir(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Append([]byte("kept\n")); err != nil {
		t.Error(err)
	}
	if got, base := l.Got(); acked != 10 || got != 10 || base != -5 || string(snap(t, l)) != "kept\n" {
		t.Errorf("acknowledged %d; %d from %d", acked, got, base)
	}
}

func TestLogFollowersAreWoken(t *testing.T) {
	dir := t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		l := NewLog(dir, 0)
		w, _ := begin(t, l)
		var total [3]int
		done := make(chan struct{})
		for i := range total {
			r, err := l.Follow(0, i == 0)
			if err != nil {
				t.Fatal(err)
			}
			go func() {
				defer func() { r.Close(); done <- struct{}{} }()
				for {
					message, more, err := r.Next()
					if err != nil {
						return
					}
					if message == nil {
						<-more
						continue
					}
					total[i] += len(message) - 1
				}
			}()
		}
		for i := range 100 {
			if err := w.Append(text(0, i)); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Millisecond)
		}
		l.Close()
		for range total {
			<-done
		}
		for i, n := range total {
			if n != 4950 {
				t.Errorf("follower %d read %d bytes", i, n)
			}
		}
	})
}

// TestLogHostile: whatever stands in the files, a log opens, and bounds hold.
func TestLogHostile(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp("", "log")
		if err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		for _, name := range []string{logFile, oldFile, nextFile} {
			content := rapid.OneOf(rapid.SliceOfN(rapid.Byte(), 0, 100), rapid.Map(rapid.Int64(), func(n int64) []byte {
				return fmt.Appendf(nil, logHead+"content", n)
			})).Draw(t, name)
			if rapid.Bool().Draw(t, "has "+name) {
				if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
					t.Fatal(err)
				}
			}
		}
		l := NewLog(dir, 0)
		w, _, err := l.Begin()
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Append([]byte("end")); err != nil {
			t.Fatal(err)
		}
		r, err := l.Snapshot()
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		if all, err := io.ReadAll(r); err != nil || !bytes.HasSuffix(all, []byte("end")) {
			t.Fatalf("%q %v", all, err)
		}
		l.Close()
	})
}
