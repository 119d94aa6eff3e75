package cli

import (
	"fmt"
	"io"
	"sync/atomic"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"

	"github.com/useshards/shard"
)

// progress shows the steps of a pull on stderr: bars on a terminal, one line per step elsewhere.
type progress struct {
	err io.Writer
	// verb is what the bytes of layers come by: pulling or importing.
	verb string
	// arrived holds what has come of each layer, in bytes.
	arrived map[string]int64
	total   int64
	bars    *mpb.Progress
	bar     *mpb.Bar
}

func (a *App) newProgress(verb string) *progress {
	p := &progress{err: a.Err, verb: verb, arrived: map[string]int64{}}
	if isTerminal(a.Err) {
		p.bars = mpb.New(mpb.WithOutput(a.Err), mpb.WithWidth(40), mpb.WithAutoRefresh())
	}
	return p
}

// show takes one step; steps it does not know are skipped.
func (p *progress) show(s shard.Progress) {
	switch s.Status {
	case "cached":
		p.line("image %s is on the host", familiar(s.Reference))
	case "pulling":
		p.total = s.Bytes
		if p.bars == nil {
			p.line("%s %s: %s, %s", p.verb, familiar(s.Reference), layers(s.Layers), humanBytes(s.Bytes))
			return
		}
		p.next(p.verb, s.Bytes, decor.CountersKiloByte("% .1f / % .1f"))
	case "layer":
		p.layer(s)
	case "unpacking":
		if p.bars == nil {
			p.line("unpacking %s", layers(s.Layers))
			return
		}
		p.next("unpacking", int64(s.Layers), decor.CountersNoUnit("%d / %d"))
	case "unpacked":
		if p.bars == nil {
			p.line("unpacked layer %d of %d", s.Layer, s.Layers)
		} else if p.bar != nil {
			p.bar.SetCurrent(int64(s.Layer))
		}
	case "building":
		p.line("starting the sandbox")
	case "pulled":
		if p.verb == "pulling" {
			p.line("pulled %s", familiar(s.Reference))
		} else {
			p.line("imported %s", familiar(s.Reference))
		}
	}
}

func layers(n int) string {
	if n == 1 {
		return "1 layer"
	}
	return fmt.Sprintf("%d layers", n)
}

func (p *progress) layer(s shard.Progress) {
	_, known := p.arrived[s.Digest]
	p.arrived[s.Digest] = s.Bytes
	if p.bars == nil {
		switch {
		case known: // the rest of a layer that has its line
		case s.Present:
			p.line("layer %s is on the host", shortDigest(s.Digest))
		default:
			p.line("layer %s", shortDigest(s.Digest))
		}
		return
	}
	if p.bar != nil {
		var sum int64
		for _, n := range p.arrived {
			sum += n
		}
		p.bar.SetCurrent(min(sum, p.total))
	}
}

// next ends the bar on the screen and begins another.
func (p *progress) next(name string, total int64, counters decor.Decorator) {
	p.endBar()
	if total <= 0 {
		return
	}
	p.bar = p.bars.AddBar(total, mpb.BarRemoveOnComplete(), mpb.PrependDecorators(decor.Name(name+" ")),
		mpb.AppendDecorators(counters))
}

func (p *progress) endBar() {
	if p.bar != nil {
		p.bar.Abort(true)
		p.bar.Wait()
		p.bar = nil
	}
}

// line prints a step; above the bar when there is one.
func (p *progress) line(format string, args ...any) {
	text := printable(fmt.Sprintf(format, args...)) + "\n"
	if p.bars != nil {
		_, _ = io.WriteString(p.bars, text)
		return
	}
	_, _ = io.WriteString(p.err, text)
}

// close leaves the terminal clean.
func (p *progress) close() {
	if p.bars != nil {
		p.endBar()
		p.bars.Wait()
	}
}

// meter counts the bytes of a copy and shows them on a terminal once the copy has become long.
type meter struct {
	r    io.Reader
	bars *mpb.Progress
	bar  *mpb.Bar
	err  io.Writer
	name string
	size int64
	read atomic.Int64
}

// meterFrom is where a copy begins to deserve a bar, in bytes.
const meterFrom = 16 << 20

// newMeter reads through r; size is what is expected, 0 when that is not known. Close it in the end.
func (a *App) newMeter(name string, r io.Reader, size int64) *meter {
	m := &meter{r: r, name: name, size: size}
	if isTerminal(a.Err) {
		m.err = a.Err
	}
	return m
}

func (m *meter) Read(p []byte) (int, error) {
	n, err := m.r.Read(p)
	total := m.read.Add(int64(n))
	switch {
	case m.bar != nil:
		m.bar.SetCurrent(total)
	case m.err != nil && total > meterFrom:
		m.bars = mpb.New(mpb.WithOutput(m.err), mpb.WithWidth(40), mpb.WithAutoRefresh())
		m.bar = m.bars.AddBar(m.size, mpb.BarRemoveOnComplete(), mpb.PrependDecorators(decor.Name(printable(m.name)+" ")),
			mpb.AppendDecorators(decor.CountersKiloByte("% .1f / % .1f")))
		m.bar.SetCurrent(total)
	}
	return n, err
}

func (m *meter) close() {
	if m.bar != nil {
		m.bar.Abort(true)
		m.bars.Wait()
	}
}
