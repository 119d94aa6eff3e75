package main

import (
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"
)

// report is what a run found.
type report struct {
	Host  string    `json:"host"`
	When  time.Time `json:"when"`
	Rows  []*row    `json:"rows"`
	Notes []string  `json:"notes,omitempty"`
}

// row is one number: samples of ours beside samples of its floor.
type row struct {
	Name   string    `json:"name"`
	Unit   string    `json:"unit"` // ms, µs, MB/s, MB, /s
	Ours   []float64 `json:"ours"`
	Floor  []float64 `json:"floor,omitempty"`
	What   string    `json:"floor_is,omitempty"`
	Target float64   `json:"target,omitempty"` // 0 is none
}

func (r *report) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

// more says whether a larger number is the better one.
func (r *row) more() bool { return r.Unit == "MB/s" || r.Unit == "/s" }

// quantile of samples; p90 of a rate is the tenth that is worst.
func quantile(samples []float64, q float64) float64 {
	if len(samples) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(samples))
	return s[min(int(q*float64(len(s))), len(s)-1)]
}

// sample measures in turn: ours, its floor, ours, …; floor may be nil. The first of each is thrown away: it warms.
func (b *bench) sample(name string, n int, target float64, what string, ours, floor func() (float64, error), unit string) error {
	r := &row{Name: name, Unit: unit, Target: target, What: what}
	for i := range n + 1 {
		if err := b.ctx.Err(); err != nil {
			return err
		}
		v, err := ours()
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if i > 0 {
			r.Ours = append(r.Ours, v)
		}
		if floor == nil {
			continue
		}
		if v, err = floor(); err != nil {
			b.report.note("%s: no floor: %v", name, err)
			floor, r.What = nil, ""
			continue
		}
		if i > 0 {
			r.Floor = append(r.Floor, v)
		}
	}
	b.report.Rows = append(b.report.Rows, r)
	b.report.line(r)
	return nil
}

// over adds the row of what the samples of w are above those of its floor.
func (b *bench) over(w *row, target float64) {
	o := &row{Name: w.Name + ", above the floor", Unit: w.Unit, Target: target, What: w.What}
	for i := range min(len(w.Ours), len(w.Floor)) {
		o.Ours = append(o.Ours, w.Ours[i]-w.Floor[i])
	}
	if len(o.Ours) > 0 {
		b.addRow(o)
	}
}

// line shows progress.
func (r *report) line(w *row) {
	fmt.Printf("%-44s %9.1f %s\n", w.Name, quantile(w.Ours, 0.5), w.Unit)
}

// timed makes a measurement in milliseconds of something that is done.
func timed(do func() error) func() (float64, error) {
	return func() (float64, error) {
		begin := time.Now()
		err := do()
		return float64(time.Since(begin)) / float64(time.Millisecond), err
	}
}

// rate makes a measurement in MB/s of something that moves bytes.
func rate(bytes int64, do func() error) func() (float64, error) {
	return func() (float64, error) {
		begin := time.Now()
		err := do()
		return float64(bytes) / 1e6 / time.Since(begin).Seconds(), err
	}
}

// table prints the report.
func (r *report) table(w io.Writer) {
	fmt.Fprintf(w, "\n%s; %s\n\n", r.Host, r.When.Format("2006-01-02"))
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "what\tp50\tp90\tunit\tfloor\tratio\ttarget\tmet\tfloor is\t")
	for _, row := range r.Rows {
		p50, p90 := quantile(row.Ours, 0.5), quantile(row.Ours, 0.9)
		if row.more() {
			p90 = quantile(row.Ours, 0.1)
		}
		floor, ratio, target, met := "–", "–", "–", ""
		if len(row.Floor) > 0 {
			f := quantile(row.Floor, 0.5)
			floor, ratio = fmt.Sprintf("%.1f", f), fmt.Sprintf("%.2f", p50/f)
		}
		if row.Target > 0 {
			target, met = fmt.Sprintf("%g", row.Target), "no"
			if row.more() && p50 >= row.Target || !row.more() && p50 <= row.Target {
				met = "yes"
			}
		}
		fmt.Fprintf(t, "%s\t%.1f\t%.1f\t%s\t%s\t%s\t%s\t%s\t%s\t\n", row.Name, p50, p90, row.Unit, floor, ratio, target, met, row.What)
	}
	_ = t.Flush()
	for _, n := range r.Notes {
		fmt.Fprintln(w, "note:", n)
	}
}
