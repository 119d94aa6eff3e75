// Command helper is what the agent's tests run inside the sandbox.
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"
)

func main() {
	args := append(os.Args[1:], "", "", "")
	switch args[0] {
	case "burst": // burst OUT ERR CODE: that many patterned bytes to each stream in odd-sized writes, then exit at once
		var both sync.WaitGroup
		for i, f := range []*os.File{os.Stdout, os.Stderr} {
			both.Go(func() { pattern(f, number(args[1+i]), byte(i)) })
		}
		both.Wait()
		os.Exit(number(args[3]))
	case "dump": // argv and environ, NUL-terminated
		out := bufio.NewWriter(os.Stdout)
		for _, list := range [][]string{os.Args, os.Environ()} {
			for _, s := range list {
				out.WriteString(s + "\x00")
			}
			out.WriteByte('\n')
		}
		out.Flush()
	case "orphans": // orphans N: N grandchildren whose parent is gone
		for range number(args[1]) / 50 {
			c := exec.Command("/bin/sh", "-c", "i=0; while [ $i -lt 50 ]; do (true &) ; i=$((i+1)); done")
			if err := c.Run(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				os.Exit(1)
			}
		}
	case "fds":
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			os.Exit(1)
		}
		for _, e := range entries {
			target, err := os.Readlink("/proc/self/fd/" + e.Name())
			if err == nil {
				fmt.Println(e.Name(), target)
			}
		}
	case "stubborn": // does not end on TERM
		signal.Ignore(syscall.SIGTERM)
		fmt.Println("ready")
		time.Sleep(time.Hour)
	case "copy": // stdin to stdout
		io.Copy(os.Stdout, os.Stdin)
	default:
		os.Exit(99)
	}
}

func number(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		os.Exit(98)
	}
	return n
}

// pattern writes n bytes that depend on their offset.
func pattern(w io.Writer, n int, seed byte) {
	buf := make([]byte, 0, 70001)
	for at := 0; at < n; {
		size := min(1+(at*7919)%70001, n-at)
		buf = buf[:0]
		for i := range size {
			buf = append(buf, byte((at+i)*31>>3)^seed)
		}
		if _, err := w.Write(buf); err != nil {
			os.Exit(97)
		}
		at += size
	}
}
