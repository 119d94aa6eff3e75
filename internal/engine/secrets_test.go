package engine

import (
	"errors"
	"slices"
	"testing"

	"github.com/useshards/shard"
)

// TestSecretHolders: what has a secret, or may have it, keeps its name and its placeholder as they are.
func TestSecretHolders(t *testing.T) {
	e, _ := policyEngine(t, 2)
	e.damaged = make(map[string]string)
	put := func(req shard.PutSecretRequest) error {
		req.Value = "value-of-a-test"
		_, err := e.PutSecret("A_KEY", req)
		return err
	}
	in := func(err error, holders ...string) {
		t.Helper()
		var refusal *shard.Error
		if !errors.As(err, &refusal) || refusal.Code != shard.CodeInUse || !slices.Equal(refusal.Holders, holders) {
			t.Errorf("got %v", err)
		}
	}
	if err := put(shard.PutSecretRequest{Destinations: []string{"a.example"}}); err != nil {
		t.Fatal(err)
	}
	sb, err := e.find(boxID(1))
	if err != nil {
		t.Fatal(err)
	}
	if err := sb.update(func(r *record) { r.grant("A_KEY", "mock-A_KEY") }); err != nil {
		t.Fatal(err)
	}
	in(put(shard.PutSecretRequest{Placeholder: "another-one"}), boxID(1))
	in(e.RemoveSecret("A_KEY", false), boxID(1))
	if err := put(shard.PutSecretRequest{}); err != nil {
		t.Errorf("a new value: %v", err)
	}
	if err := put(shard.PutSecretRequest{OnMisuse: "pause"}); err == nil {
		t.Error("a provider that is not there can pause")
	}
	if err := e.RemoveSecret("A_KEY", true); err != nil {
		t.Fatal(err)
	}
	in(put(shard.PutSecretRequest{Destinations: []string{"a.example"}}), boxID(1))
	if err := sb.update(func(r *record) { r.Sandbox.Secrets = nil }); err != nil {
		t.Fatal(err)
	}
	if err := put(shard.PutSecretRequest{Destinations: []string{"a.example"}}); err != nil {
		t.Errorf("set again: %v", err)
	}
	e.damaged["bold-fern-0009"] = "it is damaged"
	in(put(shard.PutSecretRequest{Placeholder: "another-one"}))
	if err := put(shard.PutSecretRequest{}); err != nil {
		t.Errorf("a new value beside a damaged record: %v", err)
	}
}

func TestEnvironment(t *testing.T) {
	r := &record{Env: []string{"PATH=/bin", "SSL_CERT_FILE=/of/the/image"}}
	if got := r.environment(); !slices.Equal(got, r.Env) {
		t.Errorf("without secrets: %q", got)
	}
	r.grant("B", "mock-B")
	r.grant("A", "custom-a")
	r.TrustFile = "/trust.pem"
	want := []string{"PATH=/bin", "SSL_CERT_FILE=/trust.pem", "B=mock-B", "A=custom-a", "REQUESTS_CA_BUNDLE=/trust.pem", "NODE_EXTRA_CA_CERTS=/trust.pem", "CURL_CA_BUNDLE=/trust.pem"}
	if got := r.environment(); !slices.Equal(got, want) {
		t.Errorf("with secrets: %q", got)
	}
}
