package cli

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
)

// TestConformanceRemotes reads the remotes and keys of conformance/inputs.json, which the SDKs read too.
func TestConformanceRemotes(t *testing.T) {
	var all struct {
		Remotes []struct{ Value, Is string }
		APIKeys []struct {
			Value    string
			Accepted bool
		} `json:"api_keys"`
	}
	raw, err := os.ReadFile("../../conformance/inputs.json")
	if err == nil {
		err = json.Unmarshal(raw, &all)
	}
	if err != nil || len(all.Remotes) == 0 || len(all.APIKeys) == 0 {
		t.Fatalf("read the vectors: %v", err)
	}
	for _, v := range all.Remotes {
		switch u, err := parseRemote(v.Value); {
		case v.Is == "" && err == nil:
			t.Errorf("%q is taken as %s", v.Value, u)
		case v.Is != "" && (err != nil || u.String() != v.Is):
			t.Errorf("%q is %v, %v; want %s", v.Value, u, err, v.Is)
		}
	}
	for _, v := range all.APIKeys {
		if strings.TrimSpace(v.Value) == "" {
			continue // a blank one is none here, and the connection goes without
		}
		if key, err := checkKey(v.Value); (err == nil) != v.Accepted || err == nil && key != v.Value || err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("the key %q is %q, %v", v.Value, key, err)
		}
	}
}
