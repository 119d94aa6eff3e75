package policy

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/useshards/shard"
)

// large is a policy of the most rules that are allowed, of every kind; the last one allows last.test.
func large(b *testing.B) []shard.Rule {
	b.Helper()
	var list []shard.PolicyRule
	for i := range MaxRules - 1 {
		rule := []string{"host%d.example.com tcp:443,8000-8010", "suffix:d%d.example.org", "198.51.%d.0/24 tcp:22", "*.*.w%d.test udp:443"}[i%4]
		list = append(list, shard.PolicyRule{Action: Allow, Rule: fmt.Sprintf(rule, i)})
	}
	rules, err := ParseAll(append(list, shard.PolicyRule{Action: Allow, Rule: "last.test"}))
	if err != nil {
		b.Fatal(err)
	}
	return rules
}

func BenchmarkCompile(b *testing.B) {
	rules := large(b)
	for b.Loop() {
		if _, err := Compile(rules); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkDecide(b *testing.B) {
	c, err := Compile(large(b))
	if err != nil {
		b.Fatal(err)
	}
	b.Run("lookup", func(b *testing.B) {
		for b.Loop() {
			name, err := Host("Last.test.")
			if err != nil || !c.Lookup(name).Listed {
				b.Fatal("not listed")
			}
		}
	})
	b.Run("request", func(b *testing.B) {
		addr := netip.MustParseAddr("203.0.113.7")
		for b.Loop() {
			if !c.Request("last.test", addr, "tcp", 443).Allow {
				b.Fatal("denied")
			}
		}
	})
}
