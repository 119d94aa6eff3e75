package cli

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

// format is the value of --format.
type format string

const (
	formatTable format = "table"
	formatJSON  format = "json"
)

func (f *format) String() string { return string(*f) }

func (f *format) Type() string { return "FORMAT" }

func (f *format) Set(s string) error {
	switch format(s) {
	case formatTable, formatJSON:
		*f = format(s)
		return nil
	}
	return errors.New("write json or table")
}

// formatFlag adds --format with a default.
func formatFlag(cmd *cobra.Command, f *format, value format) {
	*f = value
	cmd.Flags().Var(f, "format", "json or table")
	_ = cmd.RegisterFlagCompletionFunc("format", cobra.FixedCompletions([]string{"json", "table"}, cobra.ShellCompDirectiveNoFileComp))
}

// size is the value of an option such as --memory: MiB, nil when it was not given.
type size struct{ mib **int64 }

func (s size) String() string { return "" }

func (s size) Type() string { return "SIZE" }

func (s size) Set(text string) error {
	mib, err := shard.ParseSize(text)
	if err != nil {
		return errors.New("write a whole number and KiB, MiB, GiB, KB, MB or GB, such as 512MiB")
	}
	*s.mib = &mib
	return nil
}

// life is the value of an option for how long something is good: a duration of Go's, or whole days (30d).
type life struct{ value *time.Duration }

func (l life) String() string {
	if l.value == nil || *l.value == 0 {
		return "" // no default to tell of
	}
	return l.value.String()
}

func (l life) Type() string { return "DURATION" }

func (l life) Set(text string) error {
	if days, ok := strings.CutSuffix(text, "d"); ok {
		n, err := strconv.ParseUint(days, 10, 16)
		*l.value = time.Duration(n) * 24 * time.Hour
		if err == nil {
			return nil
		}
	} else if d, err := time.ParseDuration(text); err == nil {
		*l.value = d
		return nil
	}
	return errors.New("write a number and a unit, such as 30m, 24h or 90d")
}

// printJSON writes v indented, or nothing at all when it cannot be encoded.
func (a *App) printJSON(v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	_, err := a.Out.Write(b.Bytes())
	return err
}

// printTable writes rows of cells in columns, the first row being the head.
func (a *App) printTable(rows ...[]string) error {
	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	for _, row := range rows {
		for i, cell := range row {
			if i > 0 {
				fmt.Fprint(w, "\t")
			}
			fmt.Fprint(w, printable(cell))
		}
		fmt.Fprint(w, "\n")
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := a.Out.Write(b.Bytes())
	return err
}

// dash stands for an empty cell.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

// humanBytes shows a size as people write it: 1.5 GB.
func humanBytes(n int64) string {
	if n < 1000 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n), ""
	for _, unit = range []string{"kB", "MB", "GB", "TB"} {
		if value /= 1000; value < 999.5 {
			break
		}
	}
	if value < 9.95 {
		return fmt.Sprintf("%.1f %s", value, unit)
	}
	return fmt.Sprintf("%.0f %s", value, unit)
}

// humanMiB shows a bound: 512MiB, 10GiB; 0 is none.
func humanMiB(mib int64) string {
	switch {
	case mib == 0:
		return "none"
	case mib%1024 == 0:
		return strconv.FormatInt(mib/1024, 10) + "GiB"
	}
	return strconv.FormatInt(mib, 10) + "MiB"
}

// humanDuration shows the two largest units of a duration: 3d4h, 5m12s.
func humanDuration(d time.Duration) string {
	s := int64(math.Max(0, d.Seconds()))
	units := []struct {
		name string
		size int64
	}{{"d", 86400}, {"h", 3600}, {"m", 60}, {"s", 1}}
	for i, u := range units {
		if s < u.size {
			continue
		}
		out := fmt.Sprintf("%d%s", s/u.size, u.name)
		if i+1 < len(units) {
			if rest := s % u.size / units[i+1].size; rest > 0 {
				out += fmt.Sprintf("%d%s", rest, units[i+1].name)
			}
		}
		return out
	}
	return "0s"
}

// humanTime shows a moment in the reader's own time zone.
func humanTime(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.Local().Format("2006-01-02 15:04:05")
}

// shortDigest shows the first 12 digits of a digest.
func shortDigest(d string) string {
	algorithm, hex, ok := strings.Cut(d, ":")
	if !ok || len(hex) <= 12 {
		return d
	}
	return algorithm + ":" + hex[:12]
}
