package main

import (
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// tidyAbove is how much memory a sentry may have, in bytes, before it is looked at.
	tidyAbove = 48 << 20
	// A sentry begins with a restore, if it has one, and then it is looked at more often.
	tidyOften, tidySeldom = 250 * time.Millisecond, 4 * time.Second
	tidyEarly             = 40 // times often
	// tidyAnyway is how many looks after the last one it is tidied although it has not grown: what was in use then may not be.
	tidyAnyway = 4
)

// tidy gives memory that the sentry no longer uses back to the host. A save or a restore leaves several times what the sentry
// needs otherwise, which Go would keep for minutes: all that time it would be missing to the guest, which has to fit into one
// bound together with it.
func tidy() {
	heap := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}, {Name: "/memory/classes/heap/free:bytes"}, {Name: "/memory/classes/heap/unused:bytes"}}
	size := func() (n uint64) {
		metrics.Read(heap)
		for _, s := range heap {
			n += s.Value.Uint64()
		}
		return n
	}
	left, since := uint64(0), 0
	for n := 0; ; n++ {
		if n < tidyEarly {
			time.Sleep(tidyOften)
		} else {
			time.Sleep(tidySeldom)
		}
		since++
		if now := size(); now > tidyAbove && (now > left+left/2 || since >= tidyAnyway) {
			debug.FreeOSMemory()
			left, since = size(), 0
		}
	}
}
